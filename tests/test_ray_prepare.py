"""A Ray runtime with two workers prepares the same bytes as this process alone."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from prepared import bytes_of
from ray_runtime import ray_address
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.data.filters import Filters
from bert4rec.data.interactions import Interactions
from bert4rec.data.prepare import prepare
from bert4rec.distributed.cluster import RayWorkers, connect


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    generator = np.random.default_rng(0)
    for n in range(4):
        columns = {
            "user": [f"user {user}" for user in generator.integers(0, 50, 300)],
            "item": generator.integers(0, 80, 300),
            "timestamp": 1_600_000_000 + generator.integers(0, 100, 300),
        }
        pl.DataFrame(columns).write_parquet(folder / f"{n}.parquet")
    return folder


def test_the_command_writes_the_same_bytes_on_a_cluster(clicks: Path, tmp_path: Path) -> None:
    prepare(Interactions.read(clicks), Filters(min_item_actions=12), out=tmp_path / "here")
    options = ["--set", "data.min_item_actions=12", "--launcher", "ray", "--workers", "2"]
    options += ["--ray-address", ray_address(), "--out", str(tmp_path / "there")]
    result = CliRunner().invoke(app, ["data", "prepare", str(clicks), *options])
    assert result.exit_code == 0, result.output
    assert "50 users, " in result.output
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")
    assert {path.name for path in tmp_path.iterdir()} == {"here", "there"}


def test_an_error_of_a_worker_is_one_sentence(clicks: Path, tmp_path: Path) -> None:
    whole = (clicks / "2.parquet").read_bytes()
    middle = len(whole) // 2
    damaged = tmp_path / "2.parquet"
    damaged.write_bytes(whole[:4] + bytes(middle) + whole[middle + 4 :])  # the footer is intact
    interactions = Interactions.read([clicks / "0.parquet", damaged])
    with (
        connect(ray_address(), n_workers=2),
        pytest.raises(ValueError, match=r"^[^\n]*2\.parquet cannot be read[^\n]*$"),
    ):
        prepare(interactions, out=tmp_path / "p", workers=RayWorkers(2))
    assert not (tmp_path / "p").exists()


def test_options_that_do_nothing_are_refused(clicks: Path, tmp_path: Path) -> None:
    prepare_it = ["data", "prepare", str(clicks), "--out", str(tmp_path / "p")]
    for options, message in (
        (["--workers", "2"], "--workers does nothing without --launcher ray"),
        (["--launcher", "ray", "--threads", "2"], "--threads does nothing with --launcher ray"),
    ):
        result = CliRunner().invoke(app, [*prepare_it, *options])
        assert message in str(result.exception)
    assert not (tmp_path / "p").exists()
