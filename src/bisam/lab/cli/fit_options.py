"""The options of `bisam fit` alone: one name each, so that its signature is a list of them."""

from __future__ import annotations

from typing import Annotated

import typer

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A folder of class folders, a CSV, Parquet or JSONL file, a folder of such files, an .npz, a name of "
        "the hub, or file.py:function.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="One of ours, timm:NAME, transformers:NAME-OR-FOLDER, or file.py:function.",
        show_default="a ResNet for images, a perceptron for rows",
    ),
]
Label = Annotated[str, typer.Option(metavar="COLUMN", help="The column of the classes.")]
Text = Annotated[str, typer.Option(metavar="COLUMNS", help="The column of texts, or two with a comma.")]
Image = Annotated[str, typer.Option(metavar="COLUMN", help="The column of images, or of their paths.")]
Columns = Annotated[
    str,
    typer.Option(
        metavar="COLUMNS",
        help="Columns of numbers or categories to use, with commas between.",
        show_default="all but the label, without --text and --image",
    ),
]
Methods = Annotated[str, typer.Option(metavar="NAMES", help="Methods, with commas between.")]
Rho = Annotated[str, typer.Option(metavar="auto|NUMBER", help="The radius; auto chooses it on validation data.")]
Seeds = Annotated[
    str,
    typer.Option(
        metavar="NUMBERS",
        help="Seeds by number, as in 0,1,2 or 0-4; 2 is seed 2 alone.",
        show_default="0-2, or as time allows",
    ),
]
Minutes = Annotated[float | None, typer.Option(min=0, help="Plan epochs, seeds and the search of the radius to fit.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs of each run.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples of a step.")]
LearningRate = Annotated[float | None, typer.Option(min=0, help="The largest learning rate.")]
Measure = Annotated[str, typer.Option(metavar="NAMES", help="Measures, with commas between; the first one counts.")]
Pretrained = Annotated[
    bool | None,
    typer.Option(
        "--pretrained/--from-scratch", help="Whether defaults are those of fine-tuning.", show_default="by model"
    ),
]
HubConfig = Annotated[str, typer.Option(help="The configuration of a data set of the hub.")]
TestPart = Annotated[str, typer.Option(metavar="PART", help="The part of the data that is tested.")]
Name = Annotated[str, typer.Option(help="Folder of the results in the folder of runs.")]
