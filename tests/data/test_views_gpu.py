"""Random numbers, crops and views on a GPU: the same as on the CPU, compiled, and in a captured graph."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from siammm.data import augment, view_settings
from siammm.data.randomness import uniforms
from siammm.data.view_settings import draw, views
from tests.data.test_augment import assert_nearly_all_close, drawn, images
from tests.data.test_view_settings import INDEX
from tests.data.test_view_settings import drawn as drawn_crops

pytestmark = pytest.mark.gpu


def test_a_gpu_draws_the_same():
    index = torch.arange(100_000)
    expected = uniforms(7, 11, index, 1, 36)
    assert torch.equal(uniforms(7, 11, index.cuda(), 1, 36).cpu(), expected)
    assert torch.equal(uniforms(7, torch.tensor(11, device="cuda"), index.cuda(), 1, 36).cpu(), expected)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_draw_is_the_same():
    compiled = torch.compile(lambda epoch, index: uniforms(7, epoch, index, 1, 36), fullgraph=True)
    index = torch.arange(1000, device="cuda") + 2**40
    for step in (0, 3):
        epoch = torch.tensor(step, device="cuda")
        assert torch.equal(compiled(epoch, index), uniforms(7, epoch, index, 1, 36))


def test_a_gpu_draws_the_same_crops():
    settings = views(224)[1]
    expected = drawn_crops(settings, 375, 500)
    got = draw(settings, 375, 500, 3, torch.tensor(0, device="cuda"), INDEX.cuda(), 0).to("cpu")
    for field in fields(got):
        torch.testing.assert_close(getattr(got, field.name), getattr(expected, field.name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [8, 32, 64, 224])
def test_a_gpu_gives_the_same(size: int):
    x = images(64, size, size)
    for view, settings in enumerate(view_settings.views(size)):
        p = drawn(settings, x, view)
        got = augment.apply(x.cuda(), p.to("cuda"), settings).cpu()
        assert_nearly_all_close(got, augment.apply(x, p, settings), 5e-5)


def test_a_captured_graph_draws_every_epoch_and_batch_anew():
    pool = images(512, 32, 32).cuda()
    index = torch.arange(128, device="cuda")
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")
    pair = view_settings.views(32)

    def both() -> list[Tensor]:
        x = pool[index]
        return [augment.apply(x, view_settings.draw(s, 32, 32, 1, epoch, index, v), s) for v, s in enumerate(pair)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for step in range(3):
        epoch.fill_(step)
        index.copy_(torch.randperm(512, device="cuda")[:128])
        graph.replay()
        for got, expected in zip(captured, both(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_view_gives_the_same():
    x, index = images(64, 32, 32).cuda(), torch.arange(64, device="cuda")
    settings = view_settings.views(32)[1]

    def view(epoch: Tensor) -> Tensor:
        return augment.apply(x, view_settings.draw(settings, 32, 32, 1, epoch, index, 0), settings)

    compiled = torch.compile(view, fullgraph=True)
    for step in range(2):
        epoch = torch.tensor(step, device="cuda")
        assert_nearly_all_close(compiled(epoch), view(epoch), 5e-5)
