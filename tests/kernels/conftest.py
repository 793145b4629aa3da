"""The host kernels that this machine can run, and queues for them."""

import pytest
from queue_cases import make_queue, word
from replay_jobs import ISAS, make_kernel

from stallfree.kernels.native import NativeReplay


@pytest.fixture(scope="module", params=["torch", *(f"{isa}-2" for isa in ISAS)])
def kernel(request):
    kernel = make_kernel(request.param)
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def natives():
    """The instruction paths that this machine has."""
    kernels = []
    for isa in ISAS:
        try:
            kernels.append(NativeReplay(2, isa=isa))
        except ValueError:
            continue
    yield kernels
    for kernel in kernels:
        kernel.close()


@pytest.fixture(params=["torch", "native"])
def kind(request):
    return request.param


@pytest.fixture
def start(kind):
    """Makes queues, and closes them."""
    queues = []

    def make(done=None, overlap=True):
        queues.append(make_queue(kind, word() if done is None else done, overlap))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()
