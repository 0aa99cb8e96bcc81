"""Metrics against brute force, and against themselves with the samples spread over workers."""

import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nestpipe.batch import Jagged
from nestpipe.metrics import AUC, NDCG, HitRate, NormalizedEntropy, rank_all, target_ranks


def make_predictions(size: int = 999, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.rand(size, generator=generator)
    predictions[::3] = (predictions[::3] * 10).round() / 10  # ties, and exact 0 and 1
    labels = (torch.rand(size, generator=generator) < predictions * 0.5 + 0.1).float()
    return predictions, labels


def test_auc_counts_every_pair_and_half_of_the_ties():
    predictions, labels = make_predictions(300)
    metric = AUC()
    for part in torch.arange(300).split(77):
        metric.update(predictions[part], labels[part])
    positive, negative = predictions[labels == 1], predictions[labels == 0]
    won = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    assert metric.compute() == float(won.double()) / (len(positive) * len(negative))


def test_normalized_entropy_is_log_loss_over_base_rate_entropy():
    predictions, labels = make_predictions()
    predictions = predictions.clamp(0.01, 0.99)
    metric = NormalizedEntropy()
    metric.update(predictions, labels)
    pairs = list(zip(predictions.tolist(), labels.tolist(), strict=True))
    loss = -math.fsum(y * math.log(p) + (1 - y) * math.log(1 - p) for p, y in pairs) / len(pairs)
    rate = float(labels.double().mean())
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert metric.compute() == pytest.approx(loss / entropy, rel=1e-11)


def test_predicting_the_base_rate_has_normalized_entropy_one_and_certainty_stays_finite():
    labels = torch.tensor([1.0, 0, 0, 0])
    metric = NormalizedEntropy()
    metric.update(torch.full((4,), 0.25), labels)
    assert metric.compute() == pytest.approx(1.0, abs=1e-11)
    metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]))
    assert math.isfinite(metric.compute())


def test_hit_rate_and_ndcg():
    ranks = torch.tensor([1, 3, 10, 11, 500])
    hit_rate, ndcg = HitRate(10), NDCG(10)
    for part in ranks.split(2):
        hit_rate.update(part)
        ndcg.update(part)
    assert hit_rate.compute() == 3 / 5
    assert ndcg.compute() == pytest.approx((1 + 1 / math.log2(4) + 1 / math.log2(11)) / 5, rel=1e-15)


def test_undefined_values_are_nan():
    assert all(math.isnan(metric.compute()) for metric in (AUC(), NormalizedEntropy(), HitRate(5), NDCG(5)))
    for metric in (AUC(), NormalizedEntropy()):
        metric.update(torch.tensor([0.2, 0.4]), torch.tensor([1.0, 1.0]))
        assert math.isnan(metric.compute())


@pytest.mark.parametrize("metric", [AUC(), NormalizedEntropy(), HitRate(2), NDCG(2)], ids=lambda m: type(m).__name__)
def test_a_metric_that_is_reset_has_forgotten_everything(metric):
    ranked = isinstance(metric, HitRate | NDCG)
    first, second = (
        (torch.tensor(ranks),) if ranked else make_predictions(50, seed=seed)
        for seed, ranks in enumerate(([1, 2, 5], [2, 7]))
    )
    new = type(metric)(2) if ranked else type(metric)()
    new.update(*second)
    metric.update(*first)
    before = metric.compute()
    metric.reset()
    assert math.isnan(metric.compute())
    metric.update(*second)
    assert metric.compute() == new.compute() != before


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match=r"label 0.5 of sample 1 is neither"):
        AUC().update(torch.tensor([0.2, 0.4]), torch.tensor([1.0, 0.5]))
    with pytest.raises(ValueError, match="sample 0 is NaN"):
        AUC().update(torch.tensor([math.nan]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"prediction 2.0 of sample 1 is outside"):
        NormalizedEntropy().update(torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="must both be"):
        NormalizedEntropy().update(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="counted from 1"):
        HitRate(10).update(torch.tensor([0, 1]))


def brute_rank(scores: list[float], keys: list[int], target: int, excluded: list[int]) -> int:
    own = scores[keys.index(target)]
    others = [(s, k) for s, k in zip(scores, keys, strict=True) if k not in excluded and k != target]
    return 1 + sum(s > own or (s == own and k < target) for s, k in others)


@pytest.mark.parametrize("with_exclusion", [False, True])
def test_ranks_equal_counting_one_by_one(with_exclusion):
    generator = torch.Generator().manual_seed(3)
    keys = torch.randperm(1000, generator=generator)[:40]
    queries = torch.randint(-1, 2, (23, 4), generator=generator).float()  # whole numbers: many ties, no rounding
    candidates = torch.randint(-1, 2, (40, 4), generator=generator).float()
    targets = keys[torch.randint(40, (23,), generator=generator)]
    lengths = torch.randint(0, 6, (23,), generator=generator)
    seen = Jagged.from_lengths(keys[torch.randint(40, (int(lengths.sum()),), generator=generator)], lengths)
    seen.values[0] = 5000  # not a candidate
    seen.values[seen.offsets[7]] = targets[7]  # the target is ranked even if it was seen
    ranks = rank_all(
        lambda q, c: q @ c.T,
        queries_BD=queries,
        candidates_ND=candidates,
        candidate_keys=keys,
        target_keys=targets,
        exclude=seen if with_exclusion else None,
        chunk=5,
    )
    scores = (queries @ candidates.T).tolist()
    excluded = seen.to_lists() if with_exclusion else [[]] * 23
    assert ranks.tolist() == [
        brute_rank(scores[b], keys.tolist(), int(targets[b]), excluded[b]) for b in range(len(targets))
    ]


def test_ranking_refuses_what_it_cannot_rank():
    keys = torch.tensor([4, 2])
    with pytest.raises(ValueError, match="target key 9 is not among"):
        target_ranks(torch.zeros(1, 2), candidate_keys=keys, target_keys=torch.tensor([9]))
    with pytest.raises(ValueError, match="sample 1 hold NaN"):
        target_ranks(torch.tensor([[0, 0], [0, math.nan]]), candidate_keys=keys, target_keys=keys)
    with pytest.raises(ValueError, match="key 4 is given more than once"):
        target_ranks(torch.zeros(1, 2), candidate_keys=torch.tensor([4, 4]), target_keys=torch.tensor([4]))


def all_metrics(part: torch.Tensor) -> list[float]:
    predictions, labels = make_predictions()
    ranks = torch.randint(1, 40, (len(predictions),), generator=torch.Generator().manual_seed(5))
    auc, entropy, hit_rate, ndcg = AUC(), NormalizedEntropy(), HitRate(10), NDCG(10)
    for some in part.split(100):
        auc.update(predictions[some], labels[some])
        entropy.update(predictions[some], labels[some])
        hit_rate.update(ranks[some])
        ndcg.update(ranks[some])
    return [metric.compute() for metric in (auc, entropy, hit_rate, ndcg)]


def worker(rank: int, parts: list[torch.Tensor], port: int, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(parts))
    try:
        results.put(all_metrics(parts[rank]))
    finally:
        dist.destroy_process_group()


def test_workers_get_the_very_number_of_one_worker():
    order = torch.randperm(999, generator=torch.Generator().manual_seed(9))
    parts = [order[:100], order[100:100], order[100:]]  # uneven, one worker without samples
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, args=(parts, port, results), nprocs=len(parts), join=True)
    alone = all_metrics(torch.arange(999))
    for _ in parts:
        assert results.get() == alone
