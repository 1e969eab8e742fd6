"""Measures over a split: without dropout, every row once, whoever measures it."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from tensor_memory_lab.train.evaluation import Evaluator
from tiny_runs import tiny_run


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_measured_without_dropout_and_left_as_it_was(training):
    found = []
    for dropout in (0.0, 0.9):
        config = tiny_run(model={"dropout": dropout})
        task = config.task.build(0)
        torch.manual_seed(0)
        model = config.model.build(task).train(training)
        found.append(Evaluator(model, task, config, Accelerator(cpu=True)).split("valid"))
        assert model.training == training
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [64, 128])  # of 70 rows: the last batch, or the only one, is short
def test_processes_count_every_row_once_and_none_where_they_have_none(size):
    config = tiny_run(budget={"evaluation_batch_size": size})
    task = config.task.build(0)
    model, totals = config.model.build(task), []

    def measured(index, processes):
        def reduce(total, reduction):
            totals.append(total)
            return total

        group = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=processes,
            process_index=index,
            reduce=reduce,
        )
        return Evaluator(model, task, config, group).split("test")

    alone = measured(0, 1)
    for index in range(4):
        measured(index, 4)
    together = sum(totals)  # (measures, 2) by name: accuracy, loss
    assert together[:, 1].tolist() == [70, 70]
    means = (together[:, 0] / 70).tolist()
    assert means == pytest.approx([alone["accuracy"], alone["loss"]])
