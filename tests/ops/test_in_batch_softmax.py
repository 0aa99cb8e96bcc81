"""In-batch negatives against the formula written out, and what the correction is for."""

import pytest
import torch

from nestpipe.ops import in_batch_softmax, log_frequencies


@pytest.mark.parametrize("of_users", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("segment", [1, 50, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 17])
def test_equals_the_formula_forward_and_backward(of_users, corrected, segment, size):
    draw = torch.Generator().manual_seed(size)
    queries, items = (torch.randn(size, 6, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    keys = torch.randint(9, (size,), generator=draw)  # some of them the same
    log_q = torch.randn(size, generator=draw, dtype=torch.float64) if corrected else None
    users = torch.randint(4, (size,), generator=draw) if of_users else None
    losses = in_batch_softmax(queries, items, keys, log_q, users_N=users, segment=segment)
    wanted = []
    for b in range(size):
        logits = items @ queries[b] - (0 if log_q is None else log_q)
        compared = keys == keys[b] if users is None else (keys == keys[b]) | (users != users[b])
        total = logits.logsumexp(0) if users is None else logits[compared].logsumexp(0)
        wanted.append(total - logits[keys == keys[b]].logsumexp(0))
    expected = torch.stack(wanted) if wanted else (queries + items).sum(1)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    weights = torch.arange(1, size + 1)
    got, right = (torch.autograd.grad((part * weights).sum(), [queries, items]) for part in (losses, expected))
    torch.testing.assert_close(got, right, rtol=1e-7, atol=1e-9)


def test_a_constant_in_log_q_changes_nothing():
    queries, items, keys, log_q = torch.randn(5, 4), torch.randn(5, 4), torch.arange(5), torch.randn(5)
    torch.testing.assert_close(
        in_batch_softmax(queries, items, keys, log_q), in_batch_softmax(queries, items, keys, log_q + 3)
    )


def test_frequencies_of_the_batch_make_each_distinct_item_count_once():
    keys = torch.tensor([7, 7, 7, 5, 3, 3])
    torch.testing.assert_close(log_frequencies(keys).exp(), torch.tensor([3, 3, 3, 1, 2, 2]) / 6)
    rows = torch.randn(8, 4, dtype=torch.float64)
    queries, items = torch.randn(6, 4, dtype=torch.float64), rows[keys]
    losses = in_batch_softmax(queries, items, keys, log_frequencies(keys).double())
    distinct = [7, 5, 3]
    for b, key in enumerate(keys.tolist()):
        wanted = -(rows[distinct] @ queries[b]).log_softmax(0)[distinct.index(key)]
        torch.testing.assert_close(losses[b], wanted, rtol=1e-6, atol=1e-6)


def test_with_the_correction_scores_come_to_rest_at_popularity_without_it_where_all_are_alike():
    """Items drawn with probability p, queries that tell nothing: the full softmax would learn log p."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    keys = torch.multinomial(p, 4000, replacement=True, generator=torch.Generator().manual_seed(0))
    for log_q, rest, elsewhere in ((p.log()[keys], p.log(), torch.zeros(4)), (None, torch.zeros(4), p.log())):
        steep = []
        for scores in (rest.clone().requires_grad_(), elsewhere.clone().requires_grad_()):
            in_batch_softmax(torch.ones(4000, 1), scores[keys].unsqueeze(1), keys, log_q).mean().backward()
            assert scores.grad is not None
            steep.append(float(scores.grad.abs().max()))
        assert steep[0] < 1e-6 + 0.1 * steep[1], (log_q, steep)
