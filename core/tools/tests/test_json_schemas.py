"""The checked-in JSON Schemas: what the models say, true of every file of this repository, and strict."""

import copy
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli

from core.judge.tests.records_factory import make_checkout, make_record
from core.judge.tests.test_gpu_watch import QUIET
from core.tools.tests.conftest import Kda
from kda_judge.contract.config import Arm
from kda_judge.contract.errors import ExitCode, UsageError
from kda_judge.contract.strict_models import validate
from kda_judge.contract.tasks import Task, find_tasks
from kda_judge.evidence import ledger_migrations, run_record
from kda_judge.evidence.gpu_watch import completed
from kda_judge.evidence.ledger import encode
from kda_judge.evidence.ledger_migrations import MIGRATIONS
from kda_judge.evidence.run_record import SCHEMA_VERSION
from kda_tools.project import json_schemas
from kda_tools.project.json_schemas import FOLDER, MODELS, attribute_docstrings, ledger_file, text

ROOT = Path(__file__).resolve().parents[3]
TASKS = [pytest.param(task, id=task.folder) for task in find_tasks()]
OLD = ROOT / "core" / "judge" / "tests" / "data" / "ledger_v1.jsonl"
PYDANTIC = next(
    line.split("==")[1] for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("pydantic==")
)


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / FOLDER / name).read_text())


def errors(name: str, data: Any) -> list[str]:
    """What is wrong with `data`: place and message."""
    validator = jsonschema.Draft202012Validator(load(name))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(data)]


# ---- the files --------------------------------------------------------------------------------


@pytest.mark.skipif(version("pydantic") != PYDANTIC, reason=f"schemas are made with pydantic {PYDANTIC}")
def test_the_checked_in_schemas_are_what_the_models_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    assert json_schemas.write(check=True) == []


def test_there_is_a_schema_for_every_version_and_no_other_file() -> None:
    ledgers = {ledger_file(number) for number in (*MIGRATIONS, SCHEMA_VERSION)}
    assert {path.name for path in (ROOT / FOLDER).iterdir()} == {
        "catalogue.schema.json",
        "config.schema.json",
        "workloads.schema.json",
    } | ledgers


@pytest.mark.parametrize("path", sorted((ROOT / FOLDER).iterdir()), ids=lambda path: path.name)
def test_every_schema_is_one(path: Path) -> None:
    loaded = load(path.name)
    assert loaded["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(loaded)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_fits(task: Task) -> None:
    for name, path in (("config", task.path / "config.toml"), ("workloads", task.path / "bench" / "workloads.toml")):
        assert errors(f"{name}.schema.json", tomli.loads(path.read_text())) == []


@pytest.mark.parametrize("path", [OLD, *sorted(ROOT.glob("*/*/docs/ledger.jsonl"))], ids=lambda p: p.parents[1].name)
def test_every_ledger_line_fits_the_schema_of_its_version(path: Path) -> None:
    for line in path.read_bytes().splitlines():
        data = json.loads(line)
        assert errors(ledger_file(data["schema_version"]), data) == []
        assert errors(ledger_file(SCHEMA_VERSION), ledger_migrations.migrate(data)) == []


def test_a_line_written_now_fits(tmp_path: Path) -> None:
    record = completed(make_record(make_checkout(tmp_path)), QUIET).model_copy(update={"rerun_of": "earlier"})
    data = json.loads(encode(record))
    assert errors(ledger_file(SCHEMA_VERSION), data) == []
    assert errors(ledger_file(1), data), "version 1 knew neither watching nor repeating"


def test_an_editor_finds_the_schema_of_every_task_file() -> None:
    rules = tomli.loads((ROOT / ".taplo.toml").read_text())["rule"]
    found = {path.relative_to(ROOT): rule["schema"]["path"] for rule in rules for path in ROOT.glob(rule["include"][0])}
    for task in find_tasks():
        folder = task.path.relative_to(ROOT)
        assert found[folder / "config.toml"] == str(FOLDER / "config.schema.json")
        assert found[folder / "bench" / "workloads.toml"] == str(FOLDER / "workloads.schema.json")


# ---- what they say ----------------------------------------------------------------------------


def config() -> dict[str, Any]:
    return tomli.loads((find_tasks()[0].path / "config.toml").read_text())


def workloads() -> dict[str, Any]:
    return tomli.loads((find_tasks()[0].path / "bench" / "workloads.toml").read_text())


@pytest.mark.parametrize(
    ("name", "spoil", "where"),
    [
        ("config", lambda data: data.update(bench={"generatoins": 3}), "bench: Additional properties are not allowed"),
        ("config", lambda data: data.pop("arms"), ": 'arms' is a required property"),
        ("config", lambda data: data.update(bench={"samples": 0}), "bench.samples: 0 is less than or equal to"),
        ("config", lambda data: data.update(bench={"seeds": [1, 2]}), "bench.seeds: [1, 2] is too short"),
        ("config", lambda data: data["task"].update(op="Norm"), "task.op: 'Norm' does not match"),
        ("workloads", lambda data: data["workload"][0].update(op=1), "workload.0.op: 1 is not of type 'string'"),
        (
            "workloads",
            lambda data: next(iter(data["workload"][0]["inputs"].values())).update(dtype="bf16"),
            ".dtype: 'bf16' is not one of",
        ),
    ],
)
def test_what_the_model_refuses_the_schema_names(name: str, spoil: Callable[[Any], Any], where: str) -> None:
    data = config() if name == "config" else workloads()
    assert errors(f"{name}.schema.json", data) == []
    spoil(data)
    (wrong,) = errors(f"{name}.schema.json", data)
    assert where in wrong
    with pytest.raises(UsageError):
        validate(MODELS[f"{name}.schema.json"], data, "spoiled")


def test_descriptions_are_the_docstrings() -> None:
    """An editor shows them where the key is typed."""
    arm = load("config.schema.json")["$defs"]["Arm"]
    assert arm["description"] == Arm.__doc__
    assert arm["properties"]["compiled"]["description"] == "Wrap every callable in torch.compile."
    assert attribute_docstrings(run_record.ArmRow)["replaced"].splitlines()[1].startswith("None: not tried")
    assert set(attribute_docstrings(run_record.RunRecord)) <= set(run_record.RunRecord.model_fields)
    for path in (ROOT / FOLDER).iterdir():
        for definition in load(path.name).get("$defs", {}).values():
            assert definition.get("description"), definition


def test_no_key_has_a_title() -> None:
    """One made of the key's name would stand before the description in an editor."""
    for model in MODELS.values():
        schema_of_model = json.loads(text(model))
        for definition in (schema_of_model, *schema_of_model["$defs"].values()):
            for name, key in definition.get("properties", {}).items():
                assert "title" not in key, name


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    return tmp_path / FOLDER


def test_writing_and_checking(checkout: Path, kda: Kda) -> None:
    code, out, _ = kda("schema", "--check")
    assert code == ExitCode.UNFIT_ROWS
    assert out.splitlines() == [f"{checkout / name}: file not found; run `kda schema`" for name in MODELS]
    assert not checkout.exists()
    assert kda("schema") == (ExitCode.OK, "".join(f"{checkout / name}\n" for name in MODELS), "")
    old = checkout / ledger_file(1)
    old.write_text("frozen")
    assert kda("schema") == kda("schema", "--check") == (ExitCode.OK, "", "")
    assert old.read_text() == "frozen"


def test_a_stale_schema_is_shown_with_the_first_difference(checkout: Path, kda: Kda) -> None:
    json_schemas.write(check=False)
    path = checkout / "config.schema.json"
    data = json.loads(path.read_text())
    spoiled = copy.deepcopy(data)
    spoiled["$defs"]["Bench"]["properties"]["samples"]["default"] = 13
    path.write_text(json.dumps(spoiled, indent=2, ensure_ascii=False) + "\n")
    code, out, _ = kda("schema", "--check")
    assert code == ExitCode.UNFIT_ROWS
    samples = data["$defs"]["Bench"]["properties"]["samples"]["default"]
    told = re.sub(r":\d+: |  +", " ", out)
    assert told == f"{path} expected ' \"default\": {samples},', got ' \"default\": 13,'; run `kda schema`\n"
    path.write_text(path.read_text().replace("\n", "\r\n"), newline="")
    assert json_schemas.write(check=False) == [str(path)]
    assert json.loads(path.read_text()) == data


def test_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="expected a checkout here"):
        json_schemas.write(check=True)
