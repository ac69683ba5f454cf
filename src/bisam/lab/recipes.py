"""The experiments: a function for each table of the paper, and one line for each cell that differs.

A recipe is a table: `cells` are its configurations by row (a model, or a noise rate) and method, as in the paper.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bisam.lab.config import Config, suggestion
from bisam.lab.data import DATA_SETS
from bisam.lab.measures import title_of
from bisam.lab.methods import METHODS

FIVE_MODELS = ["densenet121", "resnet56", "vgg19bn", "wrn28-2", "wrn28-10"]
VIT, BERT = "transformers:google/vit-base-patch16-224-in21k", "transformers:google-bert/bert-base-uncased"
FOUR_METHODS = ["sgd", "sam", "bisam-log", "bisam-tanh"]


@dataclass(frozen=True)
class Recipe:
    """A table, or part of one."""

    name: str
    title: str
    published: str | None
    """The paper's label of the table; None where it is not the paper's."""
    seeds: int
    """Seeds of each cell in the paper."""
    cells: dict[tuple[str, str], Config]
    labels: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Labels in the paper by row and name in a result, where its lines are not called as the rows here."""
    by_method: bool = False
    """Whether the paper's table has a row for each method."""
    stands_in: bool = False
    """Whether the paper's numbers are shown beside those of another model."""

    @property
    def lines(self) -> list[tuple[str, str, str]]:
        """Label, row and name in a result of each line of the printed table: a line for each measure of a row."""
        if self.labels:
            return [(label, row, name) for (row, name), label in self.labels.items() if row in self.rows]
        return [line for row in self.rows for line in self._lines_of(row)]

    @property
    def first_lines(self) -> list[str]:
        """The label of the first line of each row: its other lines are other measures of the same runs."""
        firsts: dict[str, str] = {}
        for label, row, _ in self.lines:
            firsts.setdefault(row, label)
        return [*firsts.values()]

    def _lines_of(self, row: str) -> list[tuple[str, str, str]]:
        names = next(config.measured for (one, _), config in self.cells.items() if one == row)
        if len(names) == 1:
            return [(row, row, f"test_{names[0]}")]
        return [(f"{row}, {title_of(name)}", row, f"test_{name}") for name in names]

    @property
    def measure(self) -> str:
        """What its lines show, as text: "test accuracy", or "test results" where they show several measures."""
        return _measure_of(self.lines)

    @property
    def first_measure(self) -> str:
        """What its `first_lines` show, as text."""
        return _measure_of([line for line in self.lines if line[0] in self.first_lines])

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for _, method in self.cells))

    @property
    def is_complete(self) -> bool:
        """Whether every row has every method, as in the paper's tables; those of the frontier have their own."""
        return len(self.cells) == len(self.rows) * len(self.methods)

    def only(self, rows: Iterable[str] = (), methods: Iterable[str] = ()) -> Recipe:
        """The table with these rows and methods; all of them where none is named."""
        wanted_rows = [_nearest(row, self.rows, "row", f" of {self.name}") for row in rows] or self.rows
        wanted = [_nearest(method, self.methods, "method", f" of {self.name}") for method in methods] or self.methods
        return replace(self, cells={(r, m): c for (r, m), c in self.cells.items() if r in wanted_rows and m in wanted})


def _measure_of(lines: Iterable[tuple[str, str, str]]) -> str:
    names = {name.replace("top5_", "") for _, _, name in lines}
    return f"test {title_of(names.pop())}" if len(names) == 1 else "test results"


def table(
    name: str,
    title: str,
    rows: Iterable[str],
    methods: Iterable[str],
    config: Callable[[str, str], Config],
    *,
    published: str | None = None,
    seeds: int = 3,
) -> Recipe:
    """A cell for each row and method, with the configuration that `config(row, method)` returns.

    Rows must differ in data, model or noise, or have their name in the field `row`. A new table is a function that
    returns one, in `RECIPES`.
    """
    cells = {(r, m): replace(config(r, m), recipe=name, method=m) for r in rows for m in methods}
    return Recipe(name, title, published, seeds, cells)


def _cifar(data: str, model: str, **changes: Any) -> Config:
    """The training of the authors' code, which the paper's tables were made with (docs/differences.md).

    Its label smoothing puts 0.1/(K − 1) on each of the K − 1 wrong classes. That is torch's with 0.1 K/(K − 1).
    """
    classes = DATA_SETS[data].classes
    return Config(data=data, model=model, cutout=16, label_smoothing=round(0.1 * classes / (classes - 1), 6), **changes)


def _epochs(method: str, epochs: int = 200) -> int:
    return 2 * epochs if method == "sgd" else epochs  # for the same number of gradients


def cifar10() -> Recipe:
    def config(model: str, method: str) -> Config:
        return _cifar("cifar10", model, epochs=_epochs(method))

    return table("cifar10", "CIFAR-10", FIVE_MODELS, FOUR_METHODS, config, published="tab:cifar10", seeds=6)


def cifar100() -> Recipe:
    def config(model: str, method: str) -> Config:
        return _cifar("cifar100", model, epochs=_epochs(method))

    return table("cifar100", "CIFAR-100", FIVE_MODELS, FOUR_METHODS, config, published="tab:cifar100", seeds=6)


def imagenet() -> Recipe:
    mu = {"bisam-log": 5.0, "bisam-tanh": 20.0}

    def config(model: str, method: str) -> Config:
        return Config(
            data="imagenet", model=model, epochs=90, lr=0.2, batch=512, micro_batch=128, mu=mu.get(method), padding=0
        )

    made = table("imagenet", "ImageNet-1K", ["resnet50"], FOUR_METHODS[1:], config, published="tab:imagenet")
    return replace(made, labels={("resnet50", "test_accuracy"): "top1", ("resnet50", "test_top5_accuracy"): "top5"})


def adaptive() -> Recipe:
    def config(model: str, method: str) -> Config:
        return _cifar("cifar10", model, rho=2.0)

    methods = ["asam", "abisam-log", "abisam-tanh"]
    title = "Adaptive methods on CIFAR-10"
    return table("adaptive", title, FIVE_MODELS, methods, config, published="tab:adaptive_cifar10_complete", seeds=5)


def efficient() -> Recipe:
    def config(model: str, method: str) -> Config:
        return _cifar("cifar10", model)

    methods = ["esam", "ebisam-log", "ebisam-tanh"]
    title = "Efficient methods on CIFAR-10"
    return table("efficient", title, FIVE_MODELS, methods, config, published="tab:efficient_cifar10_complete", seeds=5)


def label_noise() -> Recipe:
    def config(rate: str, method: str) -> Config:
        noise = float(rate.rstrip("%")) / 100
        rho = 0.01 if rate == "80%" else 0.05  # at 80 % a ρ of 0.05 fails for SAM and BiSAM, as in the paper
        return _cifar("cifar10", "resnet32", epochs=_epochs(method), noise=noise, rho=rho)

    title, rates = "ResNet-32 on CIFAR-10 with wrong labels", ["0%", "20%", "40%", "60%", "80%"]
    return table("label_noise", title, rates, FOUR_METHODS, config, published="tab:label_noise", seeds=6)


EIGHT_METHODS = ["sgd", "sam", "bisam-log", "esam", "ebisam-log", "ksam", "looksam", "msam"]

Settings = Mapping[str, tuple[list[str], dict[str, Any]]]
"""The methods and changes of each setting of a frontier, by name."""

FRONTIER_SETTINGS: Settings = {
    "": (EIGHT_METHODS, {}),
    "200epochs": (["sgd"], {"epochs": 200}),
    "every5": (["sam", "bisam-log"], {"every": 5}),
    "every5rho0.4": (["sam"], {"every": 5, "rho": 0.4}),
    "late50": (["sam", "bisam-log"], {"start": 0.5}),
    "late25": (["sam", "bisam-log"], {"start": 0.75}),
    "late14": (["sam", "bisam-log"], {"start": 0.86}),
    "late10": (["sam", "bisam-log"], {"start": 0.9}),
    "late10rho0.4": (["sam"], {"start": 0.9, "rho": 0.4}),
    "late10rho1.2": (["sam"], {"start": 0.9, "rho": 1.2}),
    "late50every5": (["sam", "bisam-log"], {"start": 0.5, "every": 5}),
    "early50": (["sam", "bisam-log"], {"stop": 0.5}),
    "early25": (["sam", "bisam-log"], {"stop": 0.25}),
    "rho0.6": (["msam"], {"rho": 0.6}),
    "rho1.2": (["msam"], {"rho": 1.2}),
    "rho2.4": (["msam"], {"rho": 2.4}),
}
"""late25 perturbs in the last 25 % of the steps, early25 in the first. The larger ρ are 8 to 24 times SAM's; on
digits the best are 11 to 34 times (`DIGITS_SETTINGS`). MSAM's 2.4 was added when 1.2 had been the best of the three."""

DIGITS_SETTINGS: Settings = {
    "": ([*EIGHT_METHODS, "asam", "abisam-log", "fsam", "gsam", "rsam", "vasso", "wsam", "fishersam"], {}),
    "micro16": (["sam"], {"micro_batch": 16, "rho": 0.08}),
    "30epochs": (["sgd"], {"epochs": 30}),
    "every5": (["sam"], {"every": 5, "rho": 0.8}),
    "every5rho0.1": (["sam"], {"every": 5, "rho": 0.1}),
    "late50": (["sam"], {"start": 0.5, "rho": 0.8}),
    "late50rho0.1": (["sam"], {"start": 0.5, "rho": 0.1}),
    "late25": (["sam"], {"start": 0.75, "rho": 1.6}),
    "late10": (["sam"], {"start": 0.9, "rho": 2.4}),
    "late10rho0.1": (["sam"], {"start": 0.9, "rho": 0.1}),
    "early50": (["sam"], {"stop": 0.5, "rho": 0.05}),
    "early25": (["sam"], {"stop": 0.25, "rho": 0.05}),
}
RHOS_ON_DIGITS = {
    "esam": 0.006, "ebisam-log": 0.0125, "ksam": 0.0125, "looksam": 0.0015, "msam": 1.2, "asam": 0.8,
    "abisam-log": 1.44, "fsam": 0.12, "gsam": 0.07, "rsam": 0.1, "vasso": 0.07, "wsam": 0.008, "fishersam": 0.08,
}  # fmt: skip
"""Of the methods in the first setting; SAM and BiSAM have the demo's. As those of the settings, each was chosen by
validation accuracy over 20 other seeds, of the values in benchmarks/digits_rho.py. LookSAM's hardly matters below
0.003."""


def frontier() -> Recipe:
    """What sharpness costs at least: one protocol for methods and settings that cost between SGD's time and SAM's.

    A row is a model, -noise40 where 40 % of the labels are wrong, and a setting, as in resnet32-noise40-late25. Cells
    of the first setting that `cifar10` and `label_noise` have too are the same training.
    """

    def config(model: str, noise: float, method: str) -> Config:
        return _cifar("cifar10", model, epochs=_epochs(method), noise=noise, rho=METHODS[method].rho)

    places = itertools.product(("resnet32", "vgg19bn"), (0.0, 0.4))
    title = "What sharpness costs at least, on CIFAR-10"
    return _frontier("frontier", title, places, FRONTIER_SETTINGS, config, seeds=3)


def frontier_digits() -> Recipe:
    """Settings of `frontier` on the demo's images and labels, with the demo's training: minutes on a CPU.

    Each has its own ρ, see `RHOS_ON_DIGITS`. Cells that `demo` has too are the same training.
    """

    def config(model: str, noise: float, method: str) -> Config:
        return _digits(method, {**RHOS_OF_NOISE["40%"], **RHOS_ON_DIGITS}.get(method, 0.1))

    title = "What sharpness costs at least, on digits"
    return _frontier("frontier_digits", title, [("digitsnet", 0.4)], DIGITS_SETTINGS, config, seeds=20)


def _frontier(
    name: str,
    title: str,
    places: Iterable[tuple[str, float]],
    settings: Settings,
    config: Callable[[str, float, str], Config],
    *,
    seeds: int,
) -> Recipe:
    """A row for each setting with each model and noise rate; a cell is `config(model, noise, method)`, changed."""
    cells = {}
    for (model, noise), (setting, (methods, changes)) in itertools.product(places, settings.items()):
        row = frontier_row(model, noise, setting)
        for method in methods:
            cells[row, method] = replace(config(model, noise, method), recipe=name, row=row, method=method, **changes)
    return Recipe(name, title, None, seeds, cells)


def frontier_row(model: str, noise: float, setting: str = "") -> str:
    """
    >>> frontier_row("vgg19bn", 0.4, "late10"), frontier_row("resnet32", 0.0)
    ('vgg19bn-noise40-late10', 'resnet32')
    """
    return "-".join([model, *([f"noise{100 * noise:.0f}"] if noise else []), *([setting] if setting else [])])


RHOS_OF_NOISE = {
    "0%": {"sam": 0.07, "bisam-log": 0.0125, "bisam-tanh": 0.05},
    "20%": {"sam": 0.1, "bisam-log": 0.14, "bisam-tanh": 0.1},
    "40%": {"sam": 0.07, "bisam-log": 0.12, "bisam-tanh": 0.08},
    "60%": {"sam": 0.05, "bisam-log": 0.07, "bisam-tanh": 0.05},
    "80%": {"sam": 0.025, "bisam-log": 0.025, "bisam-tanh": 0.025},
}
"""On digits, by rate of wrong labels: the best by validation accuracy over 20 other seeds, of the values of
benchmarks/digits_noise_rho.py that have as many, and the smallest of those that are equal. Failed trainings count."""


def demo() -> Recipe:
    """The last weights count: the best on validation data are early ones, before SGD has learnt the noise by heart."""
    title = "Handwritten digits, 40 % of the labels wrong"
    return table("demo", title, ["40%"], FOUR_METHODS, _with_wrong_labels)


def label_noise_digits() -> Recipe:
    """The paper's table of wrong labels with the demo's images and training: minutes on a CPU. 40 % is the demo.

    Each method has its own ρ at each rate, see `RHOS_OF_NOISE`.
    """
    rates = [rate for rate in RHOS_OF_NOISE if rate != "40%"]
    title = "Handwritten digits with wrong labels"
    return table("label_noise_digits", title, rates, FOUR_METHODS, _with_wrong_labels, seeds=20)


def _with_wrong_labels(rate: str, method: str) -> Config:
    return _digits(method, RHOS_OF_NOISE[rate].get(method, 0.1), noise=float(rate.rstrip("%")) / 100)


def _digits(method: str, rho: float, noise: float = 0.4) -> Config:
    return Config(
        data="digits", model="digitsnet", epochs=_epochs(method, 30), batch=64, lr=0.05, rho=rho, noise=noise,
        label_smoothing=0.0, padding=0, flip=False, precision="fp32", select="last",
    )  # fmt: skip


def finetune() -> Recipe:
    """Without a validation part of its own (Pets), a tenth of the training images validates. The last weights count.

    500 steps are ten epochs of 50, as often through the images as that takes.
    """
    mu = {"flowers": {"bisam-log": 4.0, "bisam-tanh": 20.0}, "pets": {"bisam-log": 6.0, "bisam-tanh": 20.0}}

    def config(data: str, method: str) -> Config:
        return Config(
            data=data, model=VIT, optimizer="adamw", weight_decay=0.0, lr=1e-4, schedule="linear", warmup=0.2,
            epochs=10, epoch_steps=50, batch=512, clip_norm=1.0, mu=mu[data].get(method), label_smoothing=0.0,
            select="last", size=224, pixels="half", padding=28,
        )  # fmt: skip

    made = table(
        "finetune", "Fine-tuning on images", ["flowers", "pets"], FOUR_METHODS[1:], config, published="tab:finetune"
    )
    return replace(made, stands_in=True)


GLUE_MEASURES = {"cola": ("mcc",), "mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1")}
"""Measures of GLUE's tasks; accuracy of the others."""


def glue() -> Recipe:
    """The official validation part is tested. A twentieth of the training texts validates; the last weights count."""
    tasks = ["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"]
    rho, epochs = {"cola": 0.01, "rte": 0.005}, {"mrpc": 5, "wnli": 5}

    def config(task: str, method: str) -> Config:
        return Config(
            data=f"glue/{task}", model=BERT, optimizer="adamw", weight_decay=0.01, lr=2e-5, schedule="linear",
            epochs=epochs.get(task, 3), batch=32, clip_norm=1.0, rho=rho.get(task, 0.05), label_smoothing=0.0,
            select="last", validation=0.05, measures=",".join(GLUE_MEASURES.get(task, ("accuracy",))),
        )  # fmt: skip

    made = table(
        "glue", "Fine-tuning on GLUE", tasks, ["adamw", "sam", "bisam-log"], config, published="tab:glue", seeds=10
    )
    short = {"accuracy": "acc", "f1": "f1", "mcc": "mcc"}
    labels = {
        (task, f"test_{name}"): f"{task}_{short[name]}"
        for task in tasks
        for name in GLUE_MEASURES.get(task, ("accuracy",))
    }
    return replace(made, labels=labels, by_method=True, stands_in=True)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "imagenet": imagenet,
    "adaptive": adaptive,
    "efficient": efficient,
    "label_noise": label_noise,
    "label_noise_digits": label_noise_digits,
    "frontier": frontier,
    "frontier_digits": frontier_digits,
    "finetune": finetune,
    "glue": glue,
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; `table/row/method` is a part of it.

    >>> [*find_recipe("label_noise/80%/sam").cells]
    [('80%', 'sam')]
    """
    first, *rest = name.split("/")
    recipe = RECIPES[_nearest(first.replace("-", "_"), list(RECIPES), "recipe")]()
    if len(rest) > 2:
        raise ValueError(f"a recipe is table, table/row or table/row/method, got {name!r}")
    return recipe.only(rest[:1], rest[1:])


def _nearest(name: str, names: list[str], kind: str, of: str = "") -> str:
    if name in names:
        return name
    raise ValueError(f"unknown {kind} {name!r}{of}: {suggestion(name, names, cutoff=0.4)}")
