"""How fast simulated clients are."""

from __future__ import annotations

import math
from statistics import median, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.errors import DataError
from dure.fleet.devices import (
    Device,
    DevicesFile,
    Equal,
    Jitter,
    Lognormal,
    Stragglers,
    parse_devices,
)

SPEEDS = st.floats(1e-3, 1e6)
SETTINGS = st.one_of(
    st.builds(Equal, SPEEDS, SPEEDS, SPEEDS),
    st.builds(Stragglers, st.floats(0, 1), st.floats(1, 1e3), SPEEDS, SPEEDS, SPEEDS),
    st.builds(Jitter, st.floats(0, 1), st.floats(1, 1e3), SPEEDS, SPEEDS, SPEEDS),
    st.builds(Lognormal, st.floats(0, 10), SPEEDS, SPEEDS, SPEEDS),
)
HEADER = "client,examples_per_second,down_mbit,up_mbit\n"


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "devices.csv"
        path.write_text(text)
        return str(path)

    return written


def test_seconds_are_amounts_over_speeds():
    assert Device(50.0, 1000.0, 250.0).seconds(200, 3000, 1000) == (3.0, 4.0, 4.0)


def test_a_device_without_limits_takes_no_time():
    assert parse_devices("equal:inf:inf:inf").of(3, 0).seconds(200, 3000, 1000) == (0.0, 0.0, 0.0)


def test_links_are_given_in_megabits_and_known_in_bytes():
    assert Equal(100, 8, 1).of(0, 0) == Device(100, 1_000_000, 125_000)


@given(SETTINGS, st.integers(0, 10**9), st.integers(0, 5))
def test_a_device_is_a_function_of_client_and_seed_and_has_positive_speeds(setting, client, seed):
    device = setting.of(client, seed)
    assert all(0 < speed < math.inf for speed in device)
    assert device == setting.of(client, seed) == parse_devices(str(setting)).of(client, seed)


@given(SETTINGS)
def test_the_text_form_is_read_back(setting):
    assert parse_devices(str(setting)) == setting


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("equal", Equal()),
        ("equal:50:20:5", Equal(50, 20, 5)),
        ("stragglers:0.2:4", Stragglers(0.2, 4)),
        ("jitter:0.5:3", Jitter(0.5, 3)),
        ("lognormal:0.5", Lognormal(0.5)),
        ("lognormal:0.5:20", Lognormal(0.5, 20)),
    ],
)
def test_text_names_a_setting(text, setting):
    assert parse_devices(text) == setting


def test_the_share_of_stragglers_is_as_asked_and_only_they_compute_slower():
    devices = [Stragglers(0.2, 8, 80.0, 4, 2).of(client, 0) for client in range(4_000)]
    slow = [device for device in devices if device.examples_per_second == 10.0]
    assert abs(len(slow) / len(devices) - 0.2) < 0.025
    assert {device.examples_per_second for device in devices} == {10.0, 80.0}
    assert {device[1:] for device in devices} == {(500_000.0, 250_000.0)}


def test_jitter_slows_as_many_pieces_of_work_as_asked_and_each_client_by_itself():
    setting = Jitter(0.2, 5, 80.0, 4, 2)
    slowness = [[setting.slowness(client, work, 0) for work in range(800)] for client in range(4)]
    for one in slowness:
        assert set(one) == {1.0, 5.0}
        assert abs(one.count(5.0) / 800 - 0.2) < 0.05
    assert len(set(map(tuple, slowness))) == 4
    assert slowness[0] != [setting.slowness(0, work, 1) for work in range(800)]
    assert {setting.of(client, 0) for client in range(9)} == {Device(80.0, 500_000.0, 250_000.0)}


@given(SETTINGS.filter(lambda setting: not isinstance(setting, Jitter)), st.integers(0, 99))
def test_without_jitter_work_takes_as_long_as_the_device_says(setting, work):
    assert setting.slowness(3, work, 0) == 1.0


@pytest.mark.parametrize(("share", "speeds"), [(0.0, {100.0}), (1.0, {10.0})])
def test_nobody_and_everybody_can_be_a_straggler(share, speeds):
    assert {
        Stragglers(share, 10).of(client, 0).examples_per_second for client in range(100)
    } == speeds


def test_lognormal_speeds_have_their_median_and_spread_and_links_go_together_apart_from_them():
    devices = [Lognormal(0.7, 100, 8, 4).of(client, 0) for client in range(4_000)]
    for column, middle in zip(zip(*devices, strict=True), (100, 1e6, 5e5), strict=True):
        assert abs(math.log(median(column) / middle)) < 0.06
        assert abs(pstdev(map(math.log, column)) - 0.7) < 0.04
    assert all(math.isclose(device.down, 2 * device.up) for device in devices)
    speeds, links = (torch.tensor(column).log() for column in list(zip(*devices, strict=True))[:2])
    assert abs(torch.corrcoef(torch.stack([speeds, links]))[0, 1]) < 0.08


def test_another_seed_gives_other_devices():
    for setting in (Stragglers(0.5, 2), Lognormal(1)):
        first, second = ([setting.of(client, seed) for client in range(50)] for seed in (0, 1))
        assert first != second


def test_a_file_s_rows_are_the_clients_around_and_around(write):
    setting = DevicesFile(write(HEADER + "phone a,10,8,1\n\nphone b,20,16,2\n"))
    assert [setting.of(client, 0).examples_per_second for client in range(5)] == [
        10,
        20,
        10,
        20,
        10,
    ]
    assert setting.of(1, 0) == Device(20, 2_000_000, 250_000)
    assert parse_devices(str(setting)) == setting


def test_clients_that_are_numbers_are_in_the_order_of_these(write):
    setting = DevicesFile(write(HEADER + "10,3,1,1\n2,2,1,1\n0,1,1,1\n"))
    assert [setting.of(client, 0).examples_per_second for client in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the first line has to be 'client,examples_per_second,down_mbit,up_mbit', not ''"),
        ("client,speed\n", "not 'client,speed'"),
        (HEADER, "has no clients"),
        (HEADER + "a,1,2,3\nb,1,2\n", "line 3: 3 values, expected 4"),
        (HEADER + "a,1,2,3\n\nb,1,fast,3\n", "line 4: 'b,1,fast,3' is not a name and numbers"),
        (HEADER + "a,0,2,3\n", "line 2: speeds have to be positive"),
        (HEADER + "a,1,nan,3\n", "line 2: speeds have to be positive"),
        (HEADER + "a,1,2,3\na,1,2,3\n", "line 3: the client 'a' occurs twice"),
    ],
)
def test_a_bad_file_is_refused_when_the_setting_is_made(write, text, complaint):
    with pytest.raises(DataError, match=complaint):
        DevicesFile(write(text))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        DevicesFile(str(tmp_path / "none.csv"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match="not a CSV file"):
        DevicesFile(str(tmp_path / "binary"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("even", "there is no device setting 'even'"),
        ("equal:0", "equal: examples_per_second is 0.0, but it has to be greater than 0"),
        ("equal:1:2:nan", "equal: up_mbit is nan, but it has to be greater than 0"),
        ("stragglers:1.5", "stragglers: share is 1.5, but it has to be in .0, 1."),
        ("stragglers:nan", "stragglers: share is nan, but it has to be in .0, 1."),
        ("stragglers:0.1:0.5", "stragglers: factor is 0.5, but it has to be 1 or more and finite"),
        ("jitter:2", "jitter: share is 2.0, but it has to be in .0, 1."),
        ("jitter:0.2:0.5", "jitter: factor is 0.5, but it has to be 1 or more and finite"),
        ("lognormal:-1", "lognormal: sigma is -1.0, but it has to be in .0, 10."),
        ("file", "the path '' cannot be written"),
        ("file:a:b", "too many values: write file:PATH"),
    ],
)
def test_text_that_names_none_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_devices(text)


def test_a_path_that_no_text_can_hold_is_refused():
    with pytest.raises(ValueError, match="without ':'"):
        DevicesFile("a:b")
