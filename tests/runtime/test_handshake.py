"""What ranks say of themselves fits into its message, whatever the letters."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.handshake import Claim, _packed, _unpacked

TEXT = st.text(max_size=400)


@given(TEXT, TEXT)
def test_a_claim_arrives_with_its_texts_or_the_beginning_of_them(error, host):
    claim = Claim(error=error, strategy="ring", world_size=4, host=host)
    found = Claim(**_unpacked(_packed(asdict(claim))))
    assert (found.strategy, found.world_size) == ("ring", 4)
    assert error.startswith(found.error)
    assert host.startswith(found.host)


@pytest.mark.parametrize("letter", ["e", "é", "\U0001d11e", '"', "\n"])
def test_of_a_long_error_at_least_the_beginning_arrives(letter):
    assert len(Claim(**_unpacked(_packed(asdict(Claim(error=300 * letter))))).error) >= 30
