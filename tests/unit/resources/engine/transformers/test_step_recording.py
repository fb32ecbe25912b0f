"""What a recording that fails leaves behind, told by a torch.cuda that only counts."""

import contextlib

import pytest

from resources.engine.transformers.step_recording import RecordingError, StepRecorder


class Graph:
    """A recording whose end fails, as torch's does after a step that asked the device for a value."""

    def pool(self):
        raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")


@pytest.fixture
def cuda(monkeypatch):
    """The current stream, and the pools in which a recording is under way or which a recording holds."""
    import torch

    class Cuda:
        stream, under_way, held, pools = "default", set(), set(), 0

    class Stream:
        def wait_stream(self, other):
            pass

    @contextlib.contextmanager
    def on(stream):
        before, Cuda.stream = Cuda.stream, stream
        yield
        Cuda.stream = before

    @contextlib.contextmanager
    def recording(graph, *, pool, stream, capture_error_mode):
        Cuda.stream = stream
        Cuda.under_way.add(pool)
        Cuda.held.add(pool)
        yield  # What fails in it fails its end too: the stream stays, and the recording is under way.

    def pool():
        Cuda.pools += 1
        return Cuda.pools

    for name, value in {
        "Stream": Stream,
        "stream": on,
        "graph": recording,
        "CUDAGraph": Graph,
        "graph_pool_handle": pool,
        "current_stream": lambda: Stream() if Cuda.stream == "default" else Cuda.stream,
        "set_stream": lambda stream: setattr(Cuda, "stream", "default"),
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, pools in (("_cuda_endAllocateToPool", Cuda.under_way), ("_cuda_releasePool", Cuda.held)):
        monkeypatch.setattr(torch._C, name, lambda device, pool, pools=pools: pools.remove(pool))
    return Cuda


def test_a_recording_that_fails_leaves_nothing_under_way(cuda):
    """Memory can be given back, another recording be made, and work goes on where it went before."""
    recorder, runs = StepRecorder(), []

    def asks_when_recorded():
        runs.append(cuda.stream)
        if cuda.under_way:
            raise RuntimeError("operation not permitted when stream is capturing")

    for attempt in (1, 2):
        with pytest.raises(RecordingError, match="RuntimeError: operation not permitted"):
            recorder.recorded(asks_when_recorded)
        assert cuda.stream == "default"
        assert not cuda.under_way
        assert not cuda.held
        assert len(runs) == 3 * attempt
