"""MMoE (Ma et al., KDD 2018): several tasks on one set of rows; each weighs the same experts with a gate of its own.

gate_k = softmax(W_k x); logit_k = tower_k(sum over experts e of gate_k[e] expert_e(x)); x: dense inputs and rows side by side.

Shape legend: B samples, E experts, H width of what an expert gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch, Jagged, Output
from nestpipe.models.arguments import check_names, check_whole, check_widths, is_number
from nestpipe.models.clicks import MLP, FeatureModel, click_labels


class MMoE(FeatureModel):
    """Several things that a user may do with a sample, such as click and like: per task and sample a binary cross entropy and a
    probability, as dicts by task in Output.losses and Output.predictions. Labels: `batch.labels[task]` [B] for each.

    tasks: their names.
    task_weights: what the losses of each task are multiplied by, in the order of `tasks`; 1 each unless given.
    num_dense: columns of `batch.dense[dense]`; 0 for a model of keys only.
    features: pooled features; `rows[name]` is [B, dim] for each.
    num_experts: experts that all tasks share.
    expert: widths of each expert; the last is what it gives.
    tower: hidden widths of each task's own MLP, which ends in one logit that is not to be listed.
    dropout: behind each hidden layer of experts and towers.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[str],
        task_weights: Sequence[float] | None = None,
        num_dense: int,
        features: Sequence[str],
        dim: int,
        num_experts: int = 4,
        expert: Sequence[int] = (128, 64),
        tower: Sequence[int] = (32,),
        dropout: float = 0.0,
        dense: str = "dense",
    ) -> None:
        super().__init__(num_dense=num_dense, features=features, dim=dim, dense=dense)
        check_whole("MMoE", 1, num_experts=num_experts)
        check_widths("MMoE", expert=expert, tower=tower)
        if not expert:
            raise ValueError("MMoE: expert must have one width or more: the last is what an expert gives")
        if isinstance(tasks, str) or not isinstance(tasks, Sequence) or not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"MMoE: tasks must be a list of different names, got {tasks!r}")
        check_names("MMoE", **{f"tasks[{place}]": task for place, task in enumerate(tasks)})
        weights = [1.0] * len(tasks) if task_weights is None else list(task_weights)
        if len(weights) != len(tasks) or not all(is_number(weight) and weight >= 0 for weight in weights):
            raise ValueError(
                f"MMoE: task_weights must be a number of at least 0 for each of the {len(tasks)} tasks, got {task_weights!r}"
            )
        self.tasks, self.task_weights = tuple(tasks), tuple(weights)
        width = self.num_inputs
        self.experts = nn.ModuleList(
            MLP([width, *expert], activate_last=True, dropout=dropout) for _ in range(num_experts)
        )
        # By number: a task may have a name that a module cannot have.
        self.gates = nn.ModuleList(nn.Linear(width, num_experts, bias=False) for _ in tasks)
        self.towers = nn.ModuleList(MLP([expert[-1], *tower, 1], dropout=dropout) for _ in tasks)

    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Output:
        labels = batch.labels
        if not isinstance(labels, dict):
            raise ValueError(f"MMoE needs labels by task, {{name: [B]}} for {', '.join(self.tasks)}; set Batch.labels")
        logits = self.logits(batch, rows)
        losses: dict[str, Tensor] = {}
        predictions: dict[str, Tensor | Jagged] = {}
        for task, weight in zip(self.tasks, self.task_weights, strict=True):
            labels_B = click_labels("MMoE", labels.get(task), task).to(logits[task].dtype)
            losses[task] = weight * functional.binary_cross_entropy_with_logits(
                logits[task], labels_B, reduction="none"
            )
            predictions[task] = torch.sigmoid(logits[task].detach())
        return Output(losses=losses, predictions=predictions)

    def predict(self, batch: Batch, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The probabilities of each task alone; needs no labels."""
        return {task: torch.sigmoid(logits_B.detach()) for task, logits_B in self.logits(batch, rows).items()}

    def logits(self, batch: Batch, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """[B] of each task."""
        x = self.inputs_of(batch, rows)
        experts_BEH = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits = {}
        for task, gate, tower in zip(self.tasks, self.gates, self.towers, strict=True):
            mixed_BH = (torch.softmax(gate(x), dim=-1).unsqueeze(-1) * experts_BEH).sum(1)
            logits[task] = tower(mixed_BH).squeeze(-1)
        return logits
