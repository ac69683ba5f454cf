"""`bisam.lab.fit`: `bisam fit` from Python."""

import gc
import linecache
import signal
import sys
import tempfile
from dataclasses import replace

import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bisam.lab import fit, load
from bisam.lab.data.own import from_parts
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.preparation import Preparation
from bisam.lab.fitting.own_code import code_of_network
from bisam.lab.models.perceptron import Perceptron
from bisam.lab.spec import function
from bisam.lab.training.loop import Stopped


def network(classes):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes))


def data(count, seed):
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 4, generator=draws), torch.arange(count) % 3
    x[torch.arange(count), y] += 2
    return x, y


@pytest.fixture(scope="module")
def found():
    return fit(network, data(120, 0), data(30, 1), methods=["sam"], rho=0.05, seeds=2, epochs=2, quiet=True)


def test_the_result_prints_as_the_sentence_and_the_table(found, capsys):
    print(found)
    text = capsys.readouterr().out
    assert text.startswith(found.sentence)
    for cell in ("SGD", "SAM", "0.05", "95 % interval", "ms per step"):
        assert cell in text
    assert found.sentence in found._repr_html_()


def test_the_validation_part_is_tested_if_there_is_no_test_part(found):
    runs = [row for row in found.answer.sheet.rows if row[0] == "SAM"]
    assert runs[0][2] == "2"
    accuracies = found.answer.best.record.result["test_accuracy"] * 30 / 100
    assert accuracies == pytest.approx(round(accuracies))  # of 30 samples


def test_the_result_draws_the_curves_of_its_runs(found):
    drawn = found.curves("loss").to_dict()
    means = drawn["datasets"]["means"]
    assert {row["method"] for row in means} == {"SGD", "SAM"}
    assert {row["epoch"] for row in means} == {1, 2}
    assert all(row["least"] <= row["value"] <= row["most"] for row in means)
    assert {row["method"] for row in found.curves("flips").to_dict()["datasets"]["means"]} == {"SAM"}  # SGD has none
    with pytest.raises(ValueError, match="unknown curve 'los': choose from"):
        found.curves("los")


def test_the_weights_of_the_result_load_into_the_network(found):
    network(3).load_state_dict(found.weights)
    assert "bisam.SAM(base, model, rho=0.05)" in found.code


def test_torch_data_sets_are_accepted_and_a_given_folder_is_resumed(tmp_path, capsys):
    arguments = (network, TensorDataset(*data(60, 0)), TensorDataset(*data(12, 1)))
    options = {"test": data(12, 2), "methods": ["sam"], "rho": 0.1, "seeds": 1, "epochs": 1, "runs": tmp_path}
    first = fit(*arguments, **options, quiet=True)
    again = fit(*arguments, **options)
    assert "2 of 2 runs are done already" in capsys.readouterr().out
    assert first.sentence == again.sentence
    with pytest.raises(ValueError, match="was trained with another model"):
        fit(other_network(), *arguments[1:], **options, quiet=True)


def other_network():
    def network(classes):
        return nn.Linear(4, classes)

    return network


def test_unusable_data_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"train: give \(x, y\)"):
        fit(network, 3)
    with pytest.raises(ValueError, match=r"train is None: give \(x, y\)"):
        fit(network, None)
    frame = pandas.DataFrame({"a": range(12), "label": [0, 1] * 6})
    with pytest.raises(
        ValueError, match=r"a data frame without labels: give \(frame.drop\(columns=label\), frame\[label\]\)"
    ):
        fit(network, frame)
    with pytest.raises(ValueError, match="got 12 inputs and 11 labels"):
        fit(network, (torch.randn(12, 4), torch.arange(11) % 3))
    with pytest.raises(ValueError, match="unknown field 'epoch'"):
        fit(network, data(60, 0), epoch=3)


def test_errors_from_python_have_remedies_for_python():
    x = torch.randn(84, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"no training sample .*labels are 42 whole numbers: .* that is regression"):
        fit(network, (x, torch.arange(84) % 42 + 18), quiet=True)
    with pytest.raises(ValueError, match=r"one sample, .* labels are 42 whole numbers: .* that is regression"):
        fit(network, (x[:83], torch.arange(83) % 42 + 18), quiet=True)
    with pytest.raises(ValueError, match=r"classes by --label \(from Python, classes as y\)"):
        fit(network, (x, torch.arange(84)), quiet=True)
    with pytest.raises(ValueError, match=r"From Python give token ids"):
        fit(network, (["a text"] * 40, [0, 1] * 20), quiet=True)


def lazy(classes):
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(classes))


def test_lazy_layers_get_their_sizes_from_the_data(tmp_path):
    """The seed determines their weights, and the same function loads the saved model."""
    options = {"methods": "sam", "seeds": 1, "epochs": 2, "quiet": True}
    (x, y), *others = data(120, 0), data(30, 1)
    found = fit(lazy, (x, y), *others, **options, rho="auto", runs=tmp_path)
    again = fit(lazy, (x, y), *others, **options, rho=found.rho["sam"])
    assert found.weights.keys() == again.weights.keys()
    assert all(torch.equal(found.weights[name], again.weights[name]) for name in found.weights)
    trained = load(found.folder, lazy)
    assert trained.probabilities(x).shape == (120, 3)
    assert repr(trained) == f"Predictor(model='lazy', method='sam', rho={found.rho['sam']}, 3 classes: '0', '1', '2')"
    with pytest.raises(ValueError, match=r"lambda does not accept the inputs of data, 4: .*mat1 and mat2"):
        fit(lambda: nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(3)), (x, y), **options)


def test_a_single_method_may_be_given_as_a_string():
    found = fit(network, data(60, 0), methods="asam", rho=0.5, seeds=1, epochs=1, quiet=True)
    assert [row[0] for row in found.answer.sheet.rows] == ["SGD", "ASAM"]
    with pytest.raises(ValueError, match="unknown method 'asma': the nearest names are"):
        fit(network, data(60, 0), methods="asma", quiet=True)


@pytest.mark.parametrize("seeds", [0, -1, []])
def test_an_empty_list_or_a_number_below_one_of_seeds_is_refused(seeds):
    with pytest.raises(ValueError, match=r"seeds must be at least one, or a list of them, got"):
        fit(network, data(60, 0), seeds=seeds, quiet=True)


def test_a_rho_that_is_not_a_number_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"rho is \"auto\" or a number, got 'large'"):
        fit(network, data(60, 0), rho="large", quiet=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_missing_device_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r'torch finds no CUDA device here: use device="cpu"'):
        fit(network, data(60, 0), device="cuda", quiet=True)


def test_an_error_leaves_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="unknown field"):
        fit(network, data(60, 0), epoch=3, quiet=True)
    with pytest.raises(ValueError, match="give --minutes"):
        fit(network, data(60, 0), methods=["sam"], minutes=0, quiet=True)
    assert [*tmp_path.glob("bisam-*")] == []


def test_a_signal_keeps_the_temporary_folder_and_names_it_for_resuming(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    default = signal.getsignal(signal.SIGINT)

    class Interrupted(nn.Linear):
        def forward(self, x):
            if self.training and signal.getsignal(signal.SIGINT) is not default:  # within the training, which saves
                signal.raise_signal(signal.SIGINT)
            return super().forward(x)

    options = {"methods": ["sam"], "rho": 0.05, "seeds": 1, "epochs": 1, "quiet": True}
    with pytest.raises(Stopped, match=r"resumes there, with runs='.*bisam-") as stop:
        fit(lambda: Interrupted(4, 3), data(60, 0), **options)
    (folder,) = tmp_path.glob("bisam-*")  # torch has files of its own beside it
    assert repr(str(folder)) in str(stop.value)
    assert [*folder.rglob("*.safetensors")]


def test_a_few_samples_train_with_batch_norm_in_batches_of_two():
    def network():
        return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    x, y = torch.arange(6.0)[:, None], torch.arange(6) % 2
    found = fit(network, (x, y), methods=["sam"], rho=0.05, seeds=1, epochs=1, quiet=True)
    assert found.answer.best.config.batch == 2


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "bisam.lab.fitting.notebook")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ModuleNotFoundError, match=r"bisam.lab needs rich, which .*: pip install 'bisam\[lab\]'"):
        __import__("bisam.lab").lab.fit  # noqa: B018


def test_missing_curves_and_missing_weights_are_errors(found):
    with pytest.raises(ValueError, match="these runs have no validation_mcc: it belongs to other methods or measures"):
        found.curves("validation_mcc")
    without = replace(found, answer=replace(found.answer, best=None))
    assert without.code == ""
    with pytest.raises(ValueError, match="no run of a sharpness-aware method has weights: see the table for runs that"):
        without.weights  # noqa: B018


@pytest.mark.parametrize(("shape", "size"), [((9, 12), 9), ((6, 5), 8)])
def test_images_in_memory_get_the_size_of_their_shorter_side_but_at_least_eight(shape, size):
    x, y = torch.randint(0, 256, (24, 3, *shape), dtype=torch.uint8), torch.arange(24) % 2

    def network(classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, classes))

    found = fit(network, (x, y), methods=["sam"], rho=0.05, seeds=1, epochs=1, quiet=True)
    assert (found.answer.best.config.size, found.answer.best.config.padding) == (size, 1)


def test_a_temporary_folder_of_records_is_removed_with_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = fit(network, data(60, 0), methods=["sam"], rho=0.05, seeds=1, epochs=1, quiet=True)
    (root,) = tmp_path.glob("bisam-*")
    assert found.folder.parent == root
    assert found.weights
    del found
    gc.collect()
    assert not root.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": nn.Linear(4, 2)}, r"makes the network, because each run .* got the network Linear .*copy.deepcopy"),
        ({"model": "perceptron"}, "model must be a function that makes the network, got 'perceptron'"),
        ({"rho": [0.1, 0.2]}, r'rho is "auto" or a number, got \[0.1, 0.2\]'),
        ({"seeds": 2.0}, "seeds must be at least one, or a list of them, got 2.0"),
        ({"seeds": "0-2"}, "seeds must be at least one, or a list of them, got '0-2'"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_with_a_remedy(given, words):
    arguments = {"model": lambda: nn.Linear(4, 2), "train": (torch.zeros(20, 4), torch.arange(20) % 2), **given}
    with pytest.raises((TypeError, ValueError), match=words):
        fit(**arguments, quiet=True)


class Series(nn.Module):
    """A convolution over time, of inputs (N, channels, time)."""

    def __init__(self, classes=2):
        super().__init__()
        self.conv, self.head = nn.Conv1d(3, 4, 3), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean(2))


def test_arrays_keep_their_shape_for_a_network_of_the_user(capsys):
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, 8, generator=draws), torch.arange(60) % 2
    x[y == 1] += 1
    found = fit(Series, (x, y), methods="sam", rho=0.05, seeds=1, epochs=2)
    assert "inputs: 3×8 numbers, in this shape for a network of your own" in capsys.readouterr().out
    trained = load(found.folder, Series)
    with torch.no_grad():
        expected = trained.model(x[:5]).softmax(1)
    torch.testing.assert_close(trained.probabilities(x[:5]), expected)
    with pytest.raises(ValueError, match="has samples of 8×3 numbers, and the model was trained on 3×8"):
        trained.predict(x.transpose(1, 2))


def test_the_preparation_of_an_older_version_flattens_the_samples():
    prepared = Preparation("rows", ("0", "1"), features=24)
    x = torch.randn(5, 3, 8)
    prepared.check("rows", x, "x")
    assert torch.equal(prepared.apply(x, None, torch.device("cpu")), x.flatten(1))


def test_a_perceptron_flattens_inputs_of_any_shape(tmp_path):
    x, y = torch.randn(60, 3, 8), torch.arange(60) % 2
    model = Perceptron(24, 2).eval()
    assert torch.equal(model(x), model(x.flatten(1)))
    assert OwnData(from_parts("rows", {"train": (x, y)}, "rows")).features == 24


def test_a_data_set_with_random_or_not_finite_inputs_is_refused():
    class Flipped(TensorDataset):
        def __getitem__(self, place):
            x, y = super().__getitem__(place)
            return (x if torch.rand(()) < 0.5 else x.flip(0)), y

    with pytest.raises(ValueError, match=r"another sample each time.*read once.*remove them"):
        fit(network, Flipped(*data(60, 0)))
    x, y = data(60, 0)
    x[0, 0] = torch.nan
    with pytest.raises(ValueError, match="some inputs are not finite numbers"):
        fit(network, TensorDataset(x, y))


NETWORK = """
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        {line}

def network(classes):
    return Net(4, classes)
"""


def written(path, line):
    """Writes a module whose network computes `line`; returns the function that builds it."""
    path.write_text(NETWORK.format(line=line))
    linecache.checkcache(str(path))
    return function(f"{path}:network")


def test_a_network_whose_code_has_changed_is_refused(tmp_path):
    """As when a cell of a notebook is edited and run again. Comments may change."""
    path, options = tmp_path / "nets.py", {"rho": 0.05, "methods": "sam", "epochs": 1, "seeds": 1, "quiet": True}
    parts = (data(60, 0), data(30, 1))
    for line in ("return super().forward(x)", "# as it is\n        return super().forward(x)"):
        fit(written(path, line), *parts, runs=tmp_path / "runs", **options)
    changed = written(path, "return -super().forward(x)")
    with pytest.raises(ValueError, match=r"the code of network has changed since .* \(from Python, runs=\)"):
        fit(changed, *parts, runs=tmp_path / "runs", **options)
    again = fit(changed, *parts, runs=tmp_path / "others", **options)
    fit(lambda: changed(3), *parts, runs=tmp_path / "lambda", **options)
    fit(lambda: changed(3), *parts, runs=tmp_path / "lambda", **{**options, "seeds": 2})
    assert again.plan.code


def test_code_of_installed_libraries_is_not_recorded(tmp_path):
    assert code_of_network(lambda: nn.Linear(2, 2), nn.Linear(2, 2)) == ""
    assert code_of_network(Perceptron, Perceptron(4, 3)) == ""
    path = tmp_path / "lib/site-packages/nets.py"
    path.parent.mkdir(parents=True)
    installed = written(path, "return super().forward(x)")
    assert code_of_network(installed, installed(3)) == ""
    assert code_of_network(network, network(3)) == code_of_network(network, nn.Linear(2, 2)) != ""
