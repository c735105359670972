"""What comes from a server or a folder is data: it names what dure brings along, and what the user
has named. Nothing else is imported."""

from __future__ import annotations

import ast
import io
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dure
from dure import catalog, references
from dure.deploy.client.agreement import ServerChecks
from dure.deploy.client.policy import Policy
from dure.deploy.client.session import Session
from dure.deploy.client.site import ClientReferences, ClientSite, ConnectionOptions
from dure.deploy.client.state import ClientState
from dure.errors import DureError, PolicyError, RunFolderError
from dure.run import join as joining
from dure.run.config import RunRequest, TaskRequest
from dure.run.registry import decode_strategy, decode_world, encode, strategy_class, world_class
from dure.run.train import reload_run
from dure.run.trusted_code import ReferenceGuard
from dure.tasks.builtin import load_task
from dure.wire.requests import Machine, TaskDescription, Welcome
from dure.wire.signatures import Key
from small import small_task

CODE = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
import dure
from dure.data.partition import IID
from dure.federated.aggregate import Mean
from dure.federated.server.sampling import Uniform

with open({ran!r}, "a") as file:
    file.write("ran")

@dataclass(frozen=True)
class X(IID):
    share: float = 0.5

@dataclass(frozen=True)
class Added(Mean):
    pass

@dataclass(frozen=True)
class Chosen(Uniform):
    pass

@dataclass(frozen=True)
class Mine(dure.FedAvg):
    name: ClassVar[str] = "mine"
"""


class Disk:
    """A site's disk with code of its own, and with what a server has sent."""

    def __init__(self, folder: Path) -> None:
        self.ran = folder / "ran"
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        code = CODE.format(ran=str(self.ran))
        self.file = folder / "nightly.py"
        self.file.write_text(code)
        (folder / "package_of_the_ward").mkdir()
        (folder / "package_of_the_ward" / "inner.py").write_text(code)
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as written:
            written.writestr("evil_in_a_model.py", code)
        self.model = self.state / "model-0-12ab.safetensors"
        self.model.write_bytes(bytes(64) + archive.getvalue())
        self.places = [
            str(self.file),
            f"{folder}/../{folder.name}/nightly.py",
            f"{folder}/package_of_the_ward.inner",
            f"{self.model}/evil_in_a_model",
            "nightly",
            "package_of_the_ward.inner",
            "antigravity",
            "idlelib.idle",
            "dure.data.partition",
        ]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    return Disk(tmp_path_factory.mktemp("site"))


@contextmanager
def nothing_is_imported(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a client whose working directory has code, and its folder a model of the server's."""
    monkeypatch.chdir(disk.file.parent)
    path = list(sys.path)
    modules = set(sys.modules)
    yield
    assert sys.path == path
    new = set(sys.modules) - modules
    assert not new & {place.partition("/")[2] or place for place in disk.places}
    # What dure itself needed for the first time is installed.
    files = [getattr(sys.modules[name], "__file__", None) for name in new]
    assert all(references.is_installed(Path(file)) for file in files if file)
    assert not disk.ran.exists()


ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "split": {"cut": ("1",)},
    "parallel-split": {"cut": ("1",)},
    "split-fed": {"cut": ("1",)},
    "vertical-split": {"features": ("0:2", "2:4")},
    "parallel": {"mesh": {"data": 2}},
}


def written(name: str, kind: Callable[[str], type[Any]]) -> dict[str, Any]:
    made = kind(name)(**ARGUMENTS.get(name, {}))
    return encode(made)


STRATEGIES = [written(name, strategy_class) for name in catalog.SYSTEMS]
# A process that torchrun has not started can make no such world, and reads its fields first.
WORLDS = [
    {"name": name, "deadline": 60.0, "backend": "dure"}
    if name == "torchrun"
    else written(name, world_class)
    for name in catalog.WORLDS
]


@st.composite
def hostile(draw: st.DrawFn, disk: Disk) -> str:
    place = draw(st.sampled_from(disk.places))
    name = draw(st.sampled_from(["X", "Mine", "Added", "main", "IID"]))
    before = draw(st.sampled_from(["", " ", "clipped:1/", "bucketing:2/", "uniform/", "file:"]))
    after = draw(st.sampled_from(["", ":0.3", ":1:2:3", "/mean", "/krum:1", ",x=1", "\n"]))
    return f"{before}{place}:{name}{after}"


@pytest.mark.parametrize("one", [*STRATEGIES, *WORLDS], ids=lambda one: one["name"])
def test_no_field_of_a_system_or_world_leads_to_an_import(
    one: dict[str, Any], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = decode_strategy if one in STRATEGIES else decode_world
    with suppress(ValueError):
        decode(one)

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        field=st.sampled_from([*one, "from"]),
        text=hostile(disk) | st.sampled_from(list(catalog.SYSTEMS)),
        shape=st.sampled_from(["text", "list", "nested"]),
    )
    def decoded(field: str, text: str, shape: str) -> None:
        value: Any = {"text": text, "list": [text], "nested": {"name": text, "from": text}}[shape]
        with suppress(ValueError, DureError):
            decode({**one, field: value})

    with nothing_is_imported(disk, monkeypatch):
        decoded()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    one=st.sampled_from([*STRATEGIES, {}]),
    changes=st.dictionaries(
        st.sampled_from(["name", "from", *STRATEGIES[-1]]) | st.text(max_size=5), JSON, max_size=3
    ),
)
def test_fields_of_any_kind_are_refused_by_a_value_error(one, changes) -> None:
    with suppress(ValueError):
        decode_strategy({**one, **changes})


@pytest.mark.parametrize("depth", [1_000, 10_000])
def test_a_text_without_end_is_refused(depth: int) -> None:
    fed_avg = next(one for one in STRATEGIES if one["name"] == "fed-avg")
    with pytest.raises(ValueError, match="cannot be read"):
        decode_strategy({**fed_avg, "aggregate": "clipped:1/" * depth + "mean"})


def test_from_is_no_way_to_another_system() -> None:
    fed_avg = next(one for one in STRATEGIES if one["name"] == "fed-avg")
    with pytest.raises(ValueError, match="from is 'scaffold', but it has to be path/to"):
        decode_strategy({**fed_avg, "from": "scaffold"})
    policy = Policy(systems=("fed-avg",))
    assert policy.check(welcome({**fed_avg, "from": "scaffold"})) != []


# A site that takes part


FIELDS = ("partition", "aggregate", "selection", "from")


def welcome(strategy: Mapping[str, Any]) -> Welcome:
    return Welcome(
        1,
        "run",
        0,
        2,
        dict(strategy),
        0,
        TaskDescription({}),
        Machine("2", "AVX2", "loop", 1),
        1.0,
        1.0,
    )


class Lies:
    """A session with a server that is honest at the first look, and not at the next check-in."""

    key = Key.make()

    def __init__(self, honest: Mapping[str, Any], lie: Mapping[str, Any]) -> None:
        self.strategies = [honest, lie]
        self.checks = ServerChecks()

    def check_in(self, said: object) -> Welcome:
        return welcome(self.strategies.pop(0) if len(self.strategies) > 1 else self.strategies[0])

    def belongs(self, welcome: Welcome, name: str) -> None:
        pass


@pytest.fixture
def site(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    """Takes part in what a lying server says, with the session alone replaced."""

    def takes_part(lie: dict[str, Any], check: bool, **how: Any) -> None:
        fed_avg = encode(dure.FedAvg(clients=2))
        session = cast(Session, Lies(lie if check else fed_avg, lie))
        reach = ConnectionOptions(state=disk.state, rules=how.get("rules", ()))
        policy = Policy(systems=("fed-avg", *how.get("systems", ())))

        @contextmanager
        def opened(
            url: str, reach_: ConnectionOptions, stop: object, **more: object
        ) -> Iterator[ClientSite]:
            with ClientState(disk.state) as kept:
                yield ClientSite(session, kept, policy, reach, "")

        monkeypatch.setattr(joining, "opened", opened)
        task = how.get("task", small_task())
        if check:
            list(joining.check("http://127.0.0.1:1", task, reach))
        else:
            joining.join("http://127.0.0.1:1", task, state=disk.state)

    return takes_part


@pytest.mark.parametrize("check", [False, True], ids=["join", "check"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("place", [0, 2, 3, 4, 5, 7])
def test_a_lying_server_has_a_client_import_nothing(
    field: str, check: bool, place: int, site, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = {**encode(dure.FedAvg(clients=2)), field: f"{disk.places[place]}:X"}
    refused = pytest.raises(PolicyError, match=r"runs only its own|of its own")
    with nothing_is_imported(disk, monkeypatch), refused:
        site(lie, check)


# What a site has given itself


@pytest.fixture
def forget() -> Iterator[None]:
    """Forgets, after a test, the modules that it has run."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def given_by(disk: Disk, *references_: str, task: dure.Task | None = None) -> ClientReferences:
    return ClientReferences(references_, disk.state, task)


@pytest.mark.usefixtures("forget")
def test_a_site_runs_its_own_copy_whatever_the_servers_path_is(disk: Disk) -> None:
    fed_avg = encode(dure.FedAvg(clients=2))
    for rule, field in (("X", "partition"), ("Added", "aggregate"), ("Chosen", "selection")):
        there = {**fed_avg, field: f"/srv/fed/nightly.py:{rule}"}
        found = decode_strategy(there, given_by(disk, f"{disk.file}:{rule}"))
        assert references.reference_of(type(getattr(found, field))) == f"{disk.file}:{rule}"
    mine = {**fed_avg, "name": "mine", "from": "nightly.py:Mine"}
    assert decode_strategy(mine, given_by(disk, f"{disk.file}:Mine")).name == "mine"
    disk.ran.unlink()


@pytest.mark.usefixtures("forget")
def test_of_a_given_file_only_the_given_class_is_found(disk: Disk) -> None:
    ask = given_by(disk, f"{disk.file}:X")
    for other in ("nightly.py:Mine", "nightly.py:ran", "other.py:X", "nightly:X", "x.nightly.py:X"):
        with pytest.raises(PolicyError, match="runs only its own"):
            ask(f"/srv/fed/{other}")
    assert not disk.ran.exists()


TASK = """
from dure.data.partition import IID
from small import small_task

class Own(IID):
    pass

def task():
    return small_task()

def __getattr__(name):
    raise AssertionError(name)
"""


@pytest.mark.usefixtures("forget")
def test_classes_of_the_users_own_task_may_be_named(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "ward_task.py").write_text(TASK)
    task = load_task(f"{tmp_path}/ward_task.py:task")
    ask = given_by(disk, task=task)
    assert ask("/srv/fed/ward_task.py:Own") == f"{tmp_path}/ward_task.py:Own"
    # What it imports or defines besides is no class of its own.
    for name in ("IID", "small_task", "task", "anything", "__builtins__"):
        with pytest.raises(PolicyError, match="runs only its own"):
            ask(f"/srv/fed/ward_task.py:{name}")
    with pytest.raises(PolicyError, match="runs only its own"):
        given_by(disk, task=small_task())("/srv/fed/ward_task.py:Own")


def test_what_a_server_has_sent_cannot_be_given(disk: Disk, monkeypatch) -> None:
    for place in (f"{disk.model}/evil_in_a_model", f"{disk.state}/rules.py"):
        with pytest.raises(PolicyError, match="the folder for files that a server sends"):
            given_by(disk, f"{place}:X")
    monkeypatch.chdir(disk.state)
    with pytest.raises(PolicyError, match="the folder for files that a server sends"):
        given_by(disk, "rules.py:X")


def test_two_references_of_one_name_are_refused(disk: Disk) -> None:
    with pytest.raises(PolicyError, match="have the same name"):
        given_by(disk, "/a/rules.py:X", "/b/rules.py:X")
    given_by(disk, "/a/rules.py:X", "/a/../a/rules.py:X")
    with pytest.raises(PolicyError, match="not name a class of yours"):
        given_by(disk, "rules.py")


def test_a_file_is_no_folder_to_import_from(disk: Disk, monkeypatch) -> None:
    refused = pytest.raises(ValueError, match="is not a folder to import from")
    with nothing_is_imported(disk, monkeypatch), refused:
        references.load(f"{disk.model}/evil_in_a_model:X")


# Folders that somebody sent


@pytest.mark.parametrize("field", [*FIELDS, "name"])
@pytest.mark.parametrize("place", range(8))
def test_a_folder_that_somebody_sent_imports_nothing(
    field: str, place: int, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURE_STATE_HOME", str(tmp_path / "nothing was begun here"))
    strategy = {**encode(dure.FedAvg(clients=2)), field: f"{disk.places[place]}:X"}
    world = encode(dure.Simulated())
    asked = RunRequest(
        "label", TaskRequest("digits", {}), strategy, world, dure.Stop(rounds=1), 0, None, None
    )
    ask = ReferenceGuard(tmp_path, {"strategy": strategy})
    with nothing_is_imported(disk, monkeypatch):
        with pytest.raises(RunFolderError, match=r"runs only if you name it again|was not started"):
            reload_run(tmp_path, asked, ask, small_task(), None, None)
        task = msgspec_replaced(asked, f"{disk.places[place]}:X")
        with pytest.raises(RunFolderError, match=r"runs only if you name it again|was not started"):
            reload_run(tmp_path, task, ask, None, None, None)


def msgspec_replaced(asked: RunRequest, name: str) -> RunRequest:
    return RunRequest(
        asked.label,
        TaskRequest(name, {}),
        asked.strategy,
        asked.world,
        asked.stop,
        asked.seed,
        None,
        None,
    )


def test_a_folder_says_nothing_of_a_task_but_how_it_learns() -> None:
    from dure.run.task_checks import with_learning

    for field in ("weights", "model", "reference", "train"):
        with pytest.raises(ValueError, match=f"does not know the training option '{field}'"):
            with_learning(small_task(), {field: "/etc/passwd"})


# Every door to code


SOURCE = Path(cast(str, dure.__file__)).parent

FIXED = "the name is a constant of dure's"
HERE = "between processes that one user has started on one machine"

DOORS: dict[tuple[str, str], str] = {
    ("__init__.py", "import_module"): FIXED,
    ("catalog.py", "import_module"): FIXED,
    ("collectives/algorithms/table.py", "import_module"): FIXED,
    ("collectives/shared_memory/native.py", "import_module"): FIXED,
    ("collectives/shared_memory/torch_patches.py", "import_module"): FIXED,
    ("errors.py", "loads"): "of what it has just pickled itself",
    ("federated/engines/child.py", "loads"): HERE,
    ("federated/engines/on_ray.py", "loads"): "between processes of the user's own Ray cluster",
    ("federated/engines/processes.py", "loads"): HERE,
    ("machine/compiler.py", "import_module"): FIXED,
    ("machine/compiler.py", "spec_from_file_location"): "a file of torch's",
    ("machine/global_settings.py", "import_module"): FIXED,
    ("machine/user_code.py", "import_module"): HERE,
    ("machine/user_code.py", "run_again"): HERE,
    ("machine/torch_backend.py", "import_module"): FIXED,
    ("parallel/pipeline/trace.py", "import_module"): FIXED,
    ("references.py", "find"): "`load`: see its callers",
    ("references.py", "from_file"): "`find` and `run_again`: see their callers",
    ("references.py", "from_import_path"): "`find` and `run_again`: see their callers",
    ("references.py", "import_module"): "`find` and `run_again`: see their callers",
    ("references.py", "spec_from_file_location"): "`find` and `run_again`: see their callers",
    ("run/trusted_code.py", "import_module"): "an installed module of a run that was begun here",
    ("run/registry.py", "import_module"): "a name of the catalog",
    ("run/registry.py", "load"): "the user's text, or data under `following_references`",
    ("run/track.py", "import_module"): FIXED,
    ("settings.py", "load"): "the user's text, or data under `following_references`",
    (
        "tasks/builtin.py",
        "find",
    ): "the user's text, or a folder's that `ReferenceGuard` has let pass",
    ("trainers/libraries.py", "import_module"): FIXED,
    ("trainers/lightning_client.py", "import_module"): FIXED,
    ("worlds/processes/fork_child.py", "import_module"): HERE,
    ("worlds/processes/parcel.py", "import_module"): HERE,
    ("worlds/processes/parcel.py", "loads"): HERE,
    ("worlds/processes/rank.py", "loads"): HERE,
    ("worlds/processes/world.py", "loads"): HERE,
}
"""Every call that may run code by a text or bytes, and why that text is the user's or dure's."""

_NAMES = {"import_module", "spec_from_file_location", "__import__", "exec", "entry_points"}
_NAMES |= {"run_path", "run_module"}
"""Whoever they belong to, called or handed on."""

_OF = {
    "eval": {"builtins"},
    "loads": {"pickle", "cloudpickle", "marshal"},
    "Unpickler": {"pickle", "cloudpickle"},
    "load": {"references", "pickle", "cloudpickle", "torch", "marshal", "yaml", "joblib"},
    "find": {"references"},
    "run_again": {"references"},
    "from_file": {"references"},
    "from_import_path": {"references"},
}
"""Those of these modules alone; others have the same name for something else."""


def doors(tree: ast.Module, module: str) -> Iterator[str]:
    """The names by which a module may run code of a text."""
    owners = {
        alias.asname or alias.name: (node.module or "").rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    owners |= {node.name: module for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            name, owner = node.id, owners.get(node.id, "builtins")
        elif isinstance(node, ast.Attribute):
            name, owner = node.attr, getattr(node.value, "id", "")
        else:
            continue
        if name in _NAMES or owner in _OF.get(name, ()):
            yield name


_WORDS = (
    r"import_module|spec_from_file|__import__|entry_points|run_path|run_module|pickle|marshal|"
    r"references|torch\.load|yaml|joblib|(?<![.\w])(?:eval|exec)\("
)
"""One of them is in each file with such a name."""


def sources(pattern: str) -> Iterator[tuple[str, ast.Module]]:
    """The files of dure in which the pattern is found, parsed."""
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        if re.search(pattern, text):
            yield str(file.relative_to(SOURCE)), ast.parse(text)


def test_each_door_to_code_is_known_with_its_reason() -> None:
    found = {
        (file, name) for file, tree in sources(_WORDS) for name in doors(tree, Path(file).stem)
    }
    assert found == set(DOORS)


def test_arrays_are_read_without_pickle() -> None:
    given = [
        ast.unparse(node.value)
        for _, tree in sources("allow_pickle")
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
    ]
    assert given == ["False"]


def test_data_is_decoded_in_one_place_which_asks() -> None:
    # Where nobody asks, `find` follows all: a text in an argument is the user's own.
    entered = [
        file
        for file, tree in sources("following_references")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "following_references" in ast.unparse(node.func)
    ]
    assert entered == ["run/registry.py"]
