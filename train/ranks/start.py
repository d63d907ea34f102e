"""Which ranks a process belongs to: those that mpirun or srun started, or itself alone."""

from __future__ import annotations

import faulthandler
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from wgrad.device.errors import WgradError
from wgrad.train.ranks.world import World

# What the launchers of Open MPI, MPICH and others, and Slurm's srun tell a process of how many there are.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
START_LIMIT = 60.0  # seconds until all ranks have found each other
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
    # Of a rank that dies in MPI's own start nobody is told, and Python's threads and signals wait for that start.
    faulthandler.dump_traceback_later(START_LIMIT, exit=True, file=2)
    try:
        world = _join(started)
    finally:
        faulthandler.cancel_dump_traceback_later()
    try:
        yield world
    finally:
        world.close()


def _join(started: int) -> World:
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
    return world
