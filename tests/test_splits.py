"""Splits: who trains, who is held out, and no training on the future."""

import numpy as np
import pytest
from toys import random_histories, sequences_of

from bert4rec.data.splits import global_time, leave_one_out


def test_leave_one_out_by_hand() -> None:
    split = leave_one_out(sequences_of([[1, 2, 3, 4], [5, 6], [7, 8, 9]], 10))
    assert [split.train[i].tolist() for i in range(3)] == [[1, 2], [5, 6], [7]]
    assert split.validation.users.tolist() == [0, 2]
    assert split.validation.targets.tolist() == [3, 8]
    assert split.validation.histories[0].tolist() == [1, 2]
    assert split.test.targets.tolist() == [4, 9]
    assert split.test.histories[0].tolist() == [1, 2, 3]  # the validation item included
    assert split.train_counts.tolist() == [0, 1, 1, 0, 0, 1, 1, 1, 0, 0]


def test_global_time_holds_out_only_what_came_after_the_training_period() -> None:
    generator = np.random.default_rng(0)
    sequences = sequences_of([generator.integers(0, 9, 20).tolist() for _ in range(50)], 9)
    times = np.sort(generator.integers(0, 10**9, (50, 20)), axis=1).ravel()
    sequences.times = times
    split = global_time(sequences, 0.1, 0.2)
    last_trained = max(times[end - 1] for end in split.train.ends)
    assert len(split.validation)
    assert len(split.test)
    for held_out in (split.validation, split.test):
        target_times = times[held_out.histories.ends]
        assert (target_times > last_trained).all()
        assert (held_out.targets == sequences.tokens[held_out.histories.ends]).all()
    first_test = times[split.test.histories.ends].min()
    assert (times[split.validation.histories.ends] < first_test).all()
    assert abs((times >= first_test).mean() - 0.2) < 0.02


def test_global_time_without_times_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="leave-one-out"):
        global_time(random_histories(0))


def test_a_sample_of_held_out_users_is_fixed_by_its_seed() -> None:
    held_out = leave_one_out(random_histories(0, n_users=200)).test
    a, b, c = held_out.sample(20, 1), held_out.sample(20, 1), held_out.sample(20, 2)
    assert a.users.tolist() == b.users.tolist() != c.users.tolist()
    assert len(a) == 20
    assert held_out.sample(10_000, 0) is held_out
