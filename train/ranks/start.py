"""Which ranks a process belongs to: those that mpirun or srun started, or itself alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from wgrad.device.errors import WgradError
from wgrad.train.ranks.world import World

# What the launchers of Open MPI, MPICH and others, and Slurm's srun tell a process of how many there are.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
INSTALL = "pip install 'wgrad[mpi]', or mpi4py for the MPI that is there"


def ranks_started(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes a launcher has started, this one among them; 1 without a launcher."""
    return max((int(environment[name]) for name in _SIZES if environment.get(name, "").isdecimal()), default=1)


@contextmanager
def open_world() -> Iterator[World]:
    """The ranks of this process. WgradError: a launcher has started several, and MPI does not join them."""
    started = ranks_started()
    if started <= 1:
        yield World()
        return
    try:
        module = importlib.import_module("wgrad.train.ranks.mpi_world")
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no libmpi
        raise WgradError(f"{started} processes were started, and MPI cannot be used ({error}): {INSTALL}") from error
    size = module.MPI.COMM_WORLD.size
    if size != started:
        raise WgradError(
            f"{started} processes were started, and MPI sees {size}: the launcher is not of the MPI that mpi4py uses "
            f"({module.MPI.Get_library_version().split(',')[0].strip()}): start with that one's mpirun (or srun "
            "--mpi=pmix)"
        )
    world: World = module.MpiWorld()
    try:
        yield world
    finally:
        world.close()
