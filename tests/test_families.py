"""Every family that transformers can build is served exactly or refused, and docs/families.md says which."""

import pytest

from families import FAMILIES, Family
from family_table import serve
from running import ROOT

DOCUMENTED = {
    cells[1]: cells[4]
    for cells in (
        [cell.strip() for cell in line.split("|")] for line in (ROOT / "docs" / "families.md").read_text().splitlines()
    )
    if len(cells) > 6
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_served_exactly_or_refused_as_documented(family: Family) -> None:
    served = serve(family)

    assert served.layout == DOCUMENTED[family.name]
    if served.layout == "refused":
        assert served.reason
    else:
        assert served.max_error is not None
        assert served.max_error < 1e-4, served


def test_the_matrix_is_wide() -> None:
    layouts = [DOCUMENTED[family.name] for family in FAMILIES]

    assert len(FAMILIES) >= 40
    assert layouts.count("shared") >= 30
    assert layouts.count("padded") >= 10
