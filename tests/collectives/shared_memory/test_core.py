"""The C core alone, with threads as ranks: right values under random delays, and no race that a
sanitizer sees."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import dure.collectives.shared_memory

CORE = Path(dure.collectives.shared_memory.__file__).parent / "core"
COMPILER = shutil.which("gcc") or shutil.which("cc")
NOWHERE_NEAR = ["setarch", "-R"]  # the sanitizer wants its addresses where they usually are

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


RACES = ("-O1", "-fsanitize=thread")


def compiled(
    folder: Path, name: str, flags: tuple[str, ...], source: Path = CORE, *ready: Path
) -> Path:
    """A program of this folder with the core, or an object if the name is one's; `ready` stand for
    their sources."""
    assert COMPILER is not None
    made = folder / name
    files = [
        path
        for path in sorted(source.glob("*.c"))
        if path.stem not in {other.stem for other in ready}
    ]
    files += [*ready, Path(__file__).with_name(f"{made.stem}.c")]
    which = ["-c", str(source / f"{made.stem}.c")] if made.suffix == ".o" else map(str, files)
    common = [
        "-g",
        "-std=c11",
        "-fwrapv",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(source),
        "-pthread",
    ]
    subprocess.run(
        [COMPILER, *common, *flags, *which, "-o", str(made)],
        check=True,
        capture_output=True,
        text=True,
    )
    return made


def ran(command: list[str], seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("plain"), "stress", ("-O2",))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What takes longest to compile, and what no test breaks."""
    try:
        return compiled(tmp_path_factory.mktemp("kernels"), "kernels.o", RACES)
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no ThreadSanitizer")


@pytest.fixture(scope="module")
def sanitized(kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return compiled(tmp_path_factory.mktemp("sanitized"), "stress", RACES, CORE, kernels)
    except subprocess.CalledProcessError:
        pytest.skip("there is no library of ThreadSanitizer")


@pytest.mark.parametrize(("ranks", "spin"), [(2, 20_000), (3, 0), (5, 1_000), (8, 0)])
def test_random_calls_of_threads_give_right_values(plain: Path, ranks: int, spin: int) -> None:
    for seed in range(2):
        done = ran([str(plain), str(ranks), "400", str(seed), str(spin)])
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("ranks", "spin"), [(2, 20_000), (3, 0), (4, 5_000)])
def test_a_sanitizer_sees_no_race(sanitized: Path, ranks: int, spin: int) -> None:
    for seed in range(3):
        done = ran([*NOWHERE_NEAR, str(sanitized), str(ranks), "300", str(seed), str(spin)])
        assert done.returncode == 0, done.stderr
        assert "ThreadSanitizer" not in done.stderr


@pytest.fixture(scope="module")
def sanitized_duplex(
    sanitized: Path, kernels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """sanitized: it is skipped where there is no sanitizer, and only there."""
    return compiled(tmp_path_factory.mktemp("duplex"), "stress_duplex", RACES, CORE, kernels)


def test_a_sanitizer_sees_no_race_in_exchanges_of_two_hosts(sanitized_duplex: Path) -> None:
    for seed in range(3):
        done = ran([*NOWHERE_NEAR, str(sanitized_duplex), "60", str(seed)])
        assert done.returncode == 0, done.stderr
        assert "ThreadSanitizer" not in done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("exchange->into == exchange->out && !wait_until_sent", "0 && !wait_until_sent"),
        ("return wait_until_sent(duplex, exchange, whole(exchange));", "return 1;"),
        ("duplex->newest->next = exchange;", "(void)exchange;"),
    ],
    ids=["sums over what has not left", "over before all has left", "an exchange lost"],
)
def test_an_exchange_that_is_broken_on_purpose_is_seen(
    kernels: Path, tmp_path: Path, right: str, wrong: str
) -> None:
    shutil.copytree(CORE, tmp_path / "core")
    broken = tmp_path / "core" / "duplex.c"
    assert right in broken.read_text()
    broken.write_text(broken.read_text().replace(right, wrong))
    program = compiled(tmp_path, "stress_duplex", RACES, tmp_path / "core", kernels)

    def seen(seed: int) -> bool:
        try:
            done = ran([*NOWHERE_NEAR, str(program), "60", str(seed)], seconds=5)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0

    assert any(seen(seed) for seed in range(20))


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        (
            "sync.c",
            "atomic_store(&core->seats[core->rank].arrived, core->syncs)",
            "atomic_store_explicit(&core->seats[core->rank].arrived, core->syncs, "
            "memory_order_relaxed)",
        ),
        (
            "channel.c",
            "head + first + second, memory_order_release",
            "head + first + second, memory_order_relaxed",
        ),
        ("channel.c", "ready < header_bytes + bytes", "ready < header_bytes"),
        ("calls.c", "(window & 1)", "(window & 0)"),
        (
            "summing.c",
            "atomic_fetch_add(&core->seats[owner].taken[core->at % CALLS], share)",
            "atomic_fetch_add(&core->seats[owner].taken[core->at % CALLS], share / 2)",
        ),
        (
            "split_phase.c",
            "seats[core->rank].read, split.number)",
            "seats[core->rank].read, split.number + 2)",
        ),
        ("split_phase.c", "status == DONE && reduces ?", "status > UNFINISHED && reduces ?"),
        ("core.h", "#define CALLS (2 * UNDER_WAY)", "#define CALLS UNDER_WAY"),
    ],
    ids=[
        "a sync without release",
        "a channel without release",
        "a message that has not come",
        "one window in place of two",
        "shares not taken",
        "read before it is",
        "an end without a meeting",
        "too few places for calls",
    ],
)
def test_what_is_broken_on_purpose_is_seen(
    sanitized: Path, kernels: Path, tmp_path: Path, file: str, right: str, wrong: str
) -> None:
    """A check of the checker: without each of these pieces of the argument there is a race or a
    wrong value.

    One run may have the luck that nothing overtakes anything, hence several.
    """
    shutil.copytree(CORE, tmp_path / "core")
    broken = tmp_path / "core" / file
    assert right in broken.read_text()
    broken.write_text(broken.read_text().replace(right, wrong))
    program = compiled(tmp_path, "stress", RACES, tmp_path / "core", kernels)
    runs = (
        ran([*NOWHERE_NEAR, str(program), "3", "300", str(seed), "0"]).stderr for seed in range(20)
    )
    assert any("ThreadSanitizer: data race" in seen or ": wrong " in seen for seen in runs)
