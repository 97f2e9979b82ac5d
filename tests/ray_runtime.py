"""One small Ray runtime for all tests that need one: starting it takes longer than they do."""

import functools

import pytest


@functools.cache
def ray_address() -> str:
    """HOST:PORT of a runtime with two CPUs; this process is connected to it until it ends."""
    pytest.importorskip("ray")
    import ray

    from bert4rec.distributed import cluster

    cluster.keep_ray_quiet()
    ray.init(
        "local",
        num_cpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    address: str = ray.get_runtime_context().gcs_address
    return address
