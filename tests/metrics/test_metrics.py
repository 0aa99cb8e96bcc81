"""Metrics against brute force, and against themselves with the samples spread over workers."""

import itertools
import math

import pytest
import torch

from nestpipe.batch import Jagged
from nestpipe.metrics import (
    AUC,
    GAUC,
    MRR,
    NDCG,
    Calibration,
    Coverage,
    HitRate,
    ListMAP,
    ListMRR,
    ListNDCG,
    ListRecall,
    LogLoss,
    NormalizedEntropy,
)
from nestpipe.metrics.ranking import rank_all, target_ranks
from tests.cluster import Cluster


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


def test_log_loss_and_calibration():
    predictions, labels = make_predictions()
    predictions = predictions.clamp(0.01, 0.99)
    log_loss, calibration = LogLoss(), Calibration()
    for part in torch.arange(999).split(100):
        log_loss.update(predictions[part], labels[part])
        calibration.update(predictions[part], labels[part])
    expected = torch.nn.functional.binary_cross_entropy(predictions.double(), labels.double())
    assert log_loss.compute() == pytest.approx(float(expected), rel=1e-11)
    assert calibration.compute() == pytest.approx(float(predictions.double().sum() / labels.sum()), rel=1e-11)
    with pytest.raises(ValueError, match=r"Calibration: prediction -0.5 of sample 0 is outside"):
        calibration.update(torch.tensor([-0.5]), torch.tensor([1.0]))


def test_reciprocal_ranks_and_coverage():
    ranks = torch.tensor([1, 3, 10, 11, 2**40])
    whole, cut, coverage = MRR(), MRR(10), Coverage(2)
    for part in ranks.split(2):
        whole.update(part)
        cut.update(part)
    assert whole.compute() == pytest.approx((1 + 1 / 3 + 1 / 10 + 1 / 11) / 5, rel=1e-10)
    assert cut.compute() == pytest.approx((1 + 1 / 3 + 1 / 10) / 5, rel=1e-10)
    coverage.update(torch.tensor([[4, 9], [9, 4]]), 8)
    coverage.update(torch.tensor([[9, 1]]), 8)
    assert coverage.compute() == 3 / 8
    for make in (HitRate, NDCG, MRR, Coverage, ListRecall):
        with pytest.raises(ValueError, match=f"{make.__name__}: k must be a whole number of at least 1, got 0"):
            make(0)


def test_undefined_values_are_nan():
    of_nothing = (AUC(), NormalizedEntropy(), HitRate(5), NDCG(5), LogLoss(), Calibration(), MRR(), Coverage(3))
    of_no_lists = (GAUC(), GAUC("user"), ListNDCG(2), ListRecall(2), ListMAP(), ListMRR())
    assert all(math.isnan(metric.compute()) for metric in (*of_nothing, *of_no_lists))
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


# -- lists -------------------------------------------------------------------------------------------------------------


def make_lists(count: int = 40, *, seed: int = 0) -> tuple[Jagged, Jagged]:
    """Scores with ties, and clicks; lists that are empty, of one candidate, and without clicks or nothing else."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (count,), generator=generator)
    scores = (torch.rand(int(lengths.sum()), generator=generator) * 5).round() / 5
    labels = (torch.rand(len(scores), generator=generator) < 0.4).float()
    return Jagged.from_lengths(scores, lengths), Jagged.from_lengths(labels, lengths)


def dcg(order: list[int], labels: list[float], k: int) -> float:
    return sum(labels[place] / math.log2(2 + rank) for rank, place in enumerate(order[:k]))


def list_ndcg(scores: list[float], labels: list[float], k: int) -> float:
    """The mean over all orders that the scores allow."""
    allowed = [
        order
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    best = dcg(sorted(range(len(labels)), key=lambda place: -labels[place]), labels, k)
    return sum(dcg(order, labels, k) for order in allowed) / len(allowed) / best


@pytest.mark.parametrize("k", [1, 3, 10])
def test_ndcg_of_lists_is_the_mean_over_the_orders_that_ties_allow(k):
    predictions, labels = (part.slice(0, 25) for part in make_lists())
    kept = [(s[:6], y[:6]) for s, y in zip(predictions.to_lists(), labels.to_lists(), strict=True)]
    expected = [list_ndcg(s, y, k) for s, y in kept if any(y)]
    assert 5 < len(expected) < len(kept)
    metric = ListNDCG(k)
    metric.update(*(Jagged.from_lists([pair[i] for pair in kept], dtype=torch.float32) for i in range(2)))
    assert metric.compute() == pytest.approx(sum(expected) / len(expected), rel=1e-9)


def recall(order: tuple[int, ...], labels: list[float], k: int) -> float:
    return sum(labels[place] for place in order[:k]) / sum(labels)


def average_precision(order: tuple[int, ...], labels: list[float], k: int) -> float:
    hits = [labels[place] for place in order[:k]]
    return sum(hit * sum(hits[: n + 1]) / (n + 1) for n, hit in enumerate(hits)) / min(k, sum(labels))


def reciprocal(order: tuple[int, ...], labels: list[float], k: int) -> float:
    return next((1 / rank for rank, place in enumerate(order[:k], 1) if labels[place]), 0.0)


@pytest.mark.parametrize("k", [1, 2, 3, None])
@pytest.mark.parametrize(
    ("make", "of_order"), [(ListRecall, recall), (ListMAP, average_precision), (ListMRR, reciprocal)]
)
def test_metrics_of_lists_are_the_mean_over_the_orders_that_ties_allow(make, of_order, k):
    predictions, labels = make_lists(30, seed=2)
    kept = [(s[:6], y[:6]) for s, y in zip(predictions.to_lists(), labels.to_lists(), strict=True)]
    expected = []
    for scores, clicks in kept:
        orders = itertools.permutations(range(len(scores)))
        allowed = [o for o in orders if all(scores[a] >= scores[b] for a, b in itertools.pairwise(o))]
        if any(clicks):
            expected.append(sum(of_order(order, clicks, k or 6) for order in allowed) / len(allowed))
    assert 5 < len(expected) < len(kept)
    metric = make(k or 6) if make is ListRecall else make(k)
    metric.update(*(Jagged.from_lists([pair[i] for pair in kept], dtype=torch.float32) for i in range(2)))
    assert metric.compute() == pytest.approx(sum(expected) / len(expected), rel=1e-9)


def test_gauc_by_group_is_that_of_lists_of_the_groups_however_samples_lie():
    predictions, labels = make_lists(60)
    groups = labels.sample_ids() * 7 - 2**62  # any whole numbers
    mixed = torch.randperm(len(groups), generator=torch.Generator().manual_seed(2))
    by_list, by_group = GAUC(), GAUC("user")
    by_list.update(predictions, labels)
    for part in mixed.split(11):
        by_group.update(predictions.values[part], labels.values[part], groups[part])
    assert by_group.compute() == by_list.compute()
    with pytest.raises(ValueError, match="groups must be whole numbers, one for each of 2 samples, got none"):
        by_group.update(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(2,\)"):
        by_group.update(torch.zeros(2), torch.zeros(2), torch.zeros(2))


def test_gauc_is_the_auc_of_lists_weighted_by_their_candidates():
    predictions, labels = make_lists()
    total = weight = 0.0
    for scores, of_list in zip(predictions.to_lists(), labels.to_lists(), strict=True):
        auc = AUC()
        auc.update(torch.tensor(scores), torch.tensor(of_list))
        if not math.isnan(auc.compute()):
            total, weight = total + len(scores) * auc.compute(), weight + len(scores)
    assert 0 < weight < len(labels.values)
    metric = GAUC()
    metric.update(predictions, labels)
    assert metric.compute() == pytest.approx(total / weight, rel=1e-9)


def test_the_order_within_a_list_and_the_cut_into_batches_change_no_digit():
    predictions, labels = make_lists(200)
    turned = [
        Jagged.from_lists([x[::-1] for x in part.to_lists()], dtype=torch.float32) for part in (predictions, labels)
    ]
    for make in (GAUC, lambda: ListNDCG(3), lambda: ListRecall(3), lambda: ListMAP(3), ListMRR):
        whole, backwards, cut = make(), make(), make()
        whole.update(predictions, labels)
        backwards.update(*turned)
        for samples in torch.randperm(200, generator=torch.Generator().manual_seed(1)).split(7):
            cut.update(predictions.select(samples), labels.select(samples))
        assert whole.compute() == cut.compute() == pytest.approx(backwards.compute(), rel=1e-9)


def test_lists_without_a_decision_do_not_count_and_bad_ones_are_named():
    no_click, all_clicked = (
        Jagged.from_lists([[0.0, 0.0], []], dtype=torch.float32),
        Jagged.from_lists([[1.0, 1.0], []], dtype=torch.float32),
    )
    for metric in (GAUC(), ListNDCG(2)):
        metric.update(no_click, no_click)
        assert math.isnan(metric.compute())
        with pytest.raises(ValueError, match="must both be a Jagged"):
            metric.update(no_click.values, no_click.values)
        with pytest.raises(ValueError, match="another number of predictions"):
            metric.update(no_click, Jagged(no_click.values, torch.tensor([0, 1, 2])))
        with pytest.raises(ValueError, match="sample 1 is NaN"):
            metric.update(no_click.like(torch.tensor([0.0, math.nan])), no_click)
    gauc, ndcg = GAUC(), ListNDCG(2)
    gauc.update(no_click, all_clicked)
    ndcg.update(no_click, all_clicked)
    assert math.isnan(gauc.compute()) and ndcg.compute() == 1
    with pytest.raises(ValueError, match=r"label 0\.5 of sample 0 is neither 0 nor 1"):
        gauc.update(no_click, no_click.like(torch.tensor([0.5, 1.0])))
    with pytest.raises(ValueError, match=r"label -1\.0 is below 0"):
        ndcg.update(no_click, no_click.like(torch.tensor([-1.0, 1.0])))


def test_infinite_scores_that_are_equal_are_ties_like_any_others():
    masked = Jagged.from_lists([[-math.inf, -math.inf, 0.0, -math.inf]], dtype=torch.float32)
    clicks = Jagged.from_lists([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float32)
    finite = masked.like(masked.values.clamp(min=-1.0))
    for make in (GAUC, lambda: ListNDCG(2), lambda: ListRecall(2), ListMAP, ListMRR):
        of_masked, of_finite, backwards = make(), make(), make()
        of_masked.update(masked, clicks)
        of_finite.update(finite, clicks)
        backwards.update(masked.like(masked.values.flip(0)), clicks.like(clicks.values.flip(0)))
        assert of_masked.compute() == of_finite.compute() == pytest.approx(backwards.compute(), rel=1e-9)


# -- workers -----------------------------------------------------------------------------------------------------------


def all_metrics(part: torch.Tensor) -> list[float]:
    predictions, labels = make_predictions()
    ranks = torch.randint(1, 40, (len(predictions),), generator=torch.Generator().manual_seed(5))
    auc, entropy, hit_rate, ndcg = AUC(), NormalizedEntropy(), HitRate(10), NDCG(10)
    for some in part.split(100):
        auc.update(predictions[some], labels[some])
        entropy.update(predictions[some], labels[some])
        hit_rate.update(ranks[some])
        ndcg.update(ranks[some])
    more = [LogLoss(), Calibration(), MRR(), Coverage(3), GAUC("user")]
    for some in part.split(100):
        for metric in more[:2]:
            metric.update(predictions[some], labels[some])
        more[2].update(ranks[some])
        more[3].update(ranks[some], 50)
        more[4].update(predictions[some], labels[some], some % 37 - 18)  # groups lie on all workers
    scores, clicks = make_lists(999)
    lists = [GAUC(), ListNDCG(3), ListRecall(3), ListMAP(3), ListMRR()]
    for metric in lists:
        metric.update(scores.select(part), clicks.select(part))
    return [metric.compute() for metric in (auc, entropy, hit_rate, ndcg, *more, *lists)]


def of_worker(parts: list[torch.Tensor]) -> list[float]:
    return all_metrics(parts[torch.distributed.get_rank()])


def test_workers_get_the_very_number_of_one_worker(cluster: Cluster) -> None:
    order = torch.randperm(999, generator=torch.Generator().manual_seed(9))
    parts = [order[:100], order[100:100], order[100:]]  # uneven, one worker without samples
    alone = all_metrics(torch.arange(999))
    assert len(set(alone)) == len(alone) and not any(map(math.isnan, alone))
    for numbers in cluster.run(3, of_worker, parts):
        assert numbers == alone
