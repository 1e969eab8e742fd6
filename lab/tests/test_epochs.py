"""The order in which training shows the rows of data of known size."""

import torch

from tensor_memory_lab.tasks.epochs import _shuffled, epoch_rows


def test_an_epoch_shows_every_row_once():
    for epoch in range(3):
        rows = epoch_rows(7, 4, 7 * epoch, 7 * epoch + 7)
        assert rows.sort().values.tolist() == list(range(7))
    whole = epoch_rows(7, 4, 0, 21)
    assert torch.equal(whole[5:16], epoch_rows(7, 4, 5, 16))
    assert not torch.equal(whole[:7], whole[7:14])


def test_the_order_of_an_epoch_is_made_of_seed_and_epoch_alone():
    orders = []
    for drawn_before in (1, 2):
        _shuffled.cache_clear()  # as in another process, of another method
        torch.manual_seed(drawn_before)
        orders.append(epoch_rows(50, 4, 0, 50))
    assert torch.equal(*orders)
    assert not torch.equal(orders[0], epoch_rows(50, 5, 0, 50))
