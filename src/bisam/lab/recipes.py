"""The experiments: a function for each table of the paper, and one line for each cell that differs.

A recipe is a table: `cells` are its configurations by row (a model, or a noise rate) and method, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from bisam.lab.config import Config, suggestion
from bisam.lab.data import DATA_SETS

FIVE_MODELS = ["densenet121", "resnet56", "vgg19bn", "wrn28-2", "wrn28-10"]
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
    measures: tuple[tuple[str, str], ...] = ()
    """Label and name in a result of each row, where the paper's rows are measures and not models or noise rates."""

    @property
    def lines(self) -> list[tuple[str, str, str]]:
        """Label in the paper, row here and name in a result, of each line of the printed table."""
        if self.measures:
            return [(label, row, name) for row in self.rows for label, name in self.measures]
        return [(row, row, "test_accuracy") for row in self.rows]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for _, method in self.cells))

    def only(self, rows: Iterable[str] = (), methods: Iterable[str] = ()) -> Recipe:
        """The table with these rows and methods; all of them where none is named."""
        wanted_rows = [_nearest(row, self.rows, f"row of {self.name}") for row in rows] or self.rows
        wanted = [_nearest(method, self.methods, f"method of {self.name}") for method in methods] or self.methods
        return replace(self, cells={(r, m): c for (r, m), c in self.cells.items() if r in wanted_rows and m in wanted})


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

    Rows must differ in data, model or noise. A new table is a function that returns one, in `RECIPES`.
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
    return replace(made, measures=(("top1", "test_accuracy"), ("top5", "test_top5_accuracy")))


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


def demo() -> Recipe:
    """The last weights count: the best on validation data are early ones, before SGD has learnt the noise by heart.

    ρ was chosen among 0.05, 0.1 and 0.2 on other seeds.
    """

    def config(rate: str, method: str) -> Config:
        return Config(
            data="digits", model="digitsnet", epochs=_epochs(method, 30), batch=64, lr=0.05, rho=0.1, noise=0.4,
            label_smoothing=0.0, padding=0, flip=False, precision="fp32", select="last",
        )  # fmt: skip

    title = "Handwritten digits, 40 % of the labels wrong"
    return table("demo", title, ["40%"], FOUR_METHODS, config)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "imagenet": imagenet,
    "adaptive": adaptive,
    "efficient": efficient,
    "label_noise": label_noise,
}


def find(name: str) -> Recipe:
    """The recipe of that name; `table/row/method` is a part of it.

    >>> [*find("label_noise/80%/sam").cells]
    [('80%', 'sam')]
    """
    first, *rest = name.split("/")
    recipe = RECIPES[_nearest(first.replace("-", "_"), list(RECIPES), "recipe")]()
    if len(rest) > 2:
        raise ValueError(f"a recipe is table, table/row or table/row/method, got {name!r}")
    return recipe.only(rest[:1], rest[1:])


def _nearest(name: str, names: list[str], kind: str) -> str:
    if name in names:
        return name
    raise ValueError(f"no {kind} is called {name!r}: {suggestion(name, names, cutoff=0.4)}")
