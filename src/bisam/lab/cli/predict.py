"""The command `bisam predict`: the classes of new samples, by the weights of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from bisam.lab.cli import options as cli_options
from bisam.lab.cli.options import errors_in_one_line
from bisam.lab.cli.output import print_line, write_text
from bisam.lab.predicting.predictions import predictions
from bisam.lab.predicting.predictor import load

TABLE = Path("predictions.csv")


def predict(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=cli_options.folder, help="Folder of a bisam fit, or of a run.")
    ],
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="Images, or a CSV, Parquet, JSONL or .npz file; with or without labels."),
    ],
    out: Annotated[Path, typer.Option(help="The table of predictions.")] = TABLE,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to predict.")] = "auto",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples that are predicted at once.", show_default="by kind of data")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model, if it is not where it was in the training.")
    ] = "",
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run the Python file that the folder names as model.")
    ] = False,
) -> None:
    """Predict the classes of new samples with a trained model, and measure the predictions if there are labels."""
    with errors_in_one_line():
        if out.suffix.lower() not in ("", ".csv"):
            raise ValueError(
                f"predictions are written as a CSV file, got {out}: name it {out.with_suffix('.csv').name}"
            )
        if out.exists() and Path(data).exists() and out.samefile(data):
            raise ValueError(f"the predictions would replace {data}, which they are of: give another --out")
        torch_device = cli_options.device(device)
        predictor = load(folder, model or None, device=torch_device, run_code=run_code)
        with cli_options.threads_for(torch_device, [predictor.beside.model]):
            try:
                found = predictions(predictor, data, batch)
            except torch.OutOfMemoryError:
                raise ValueError(
                    f"a batch does not fit into the memory of {torch_device}: give a smaller --batch"
                ) from None
        write_text(out, found.as_csv(), given=out != TABLE)
        for line in found.lines():
            print_line(line)
        print_line(f"wrote {out}")
