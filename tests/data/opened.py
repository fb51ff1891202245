"""What the tests of sources share."""

from __future__ import annotations

from typing import Any

import pytest

from siammm.core.errors import InputError, SiamMMError
from siammm.data.sources import Source, open_source
from tests.data.image_sets import encoded, example_images

GIVEN = example_images()


def refused(data: Any, match: str, error: type[SiamMMError] = InputError, **settings: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        open_source(data, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))


def identifiers(source: Source) -> list[str]:
    return [source.identifier(i) for i in range(len(source))]


PNGS = [encoded(image) for image in GIVEN.images[:4]]
