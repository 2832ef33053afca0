"""What is loaded beside the samples themselves, and how often."""

from egeria_cache.samples.loading import FREE_S, MAX_SHARE, Company


def test_samples_are_compared_in_turns_at_a_share_of_what_loading_takes():
    company = Company()
    assert company.choose(4) == [3, 2, 1, 0]  # the first batch whole: nothing is known of the cost
    company.compared(4, 4 * FREE_S)
    assert company.choose(4) == []
    company.loaded_s += 10 * FREE_S / MAX_SHARE
    rows = company.choose(8)
    company.compared(len(rows), 0.0)
    assert 0 < len(rows) < 8
    assert company.choose(8)[-1] == (rows[0] + 1) % 8  # it goes on where it stopped
