"""What the simulator has found, each with as little around it as it takes. (A seed's schedule changes with
the simulator: so, several.)"""

from __future__ import annotations

from simulation.campaign import simulate
from simulation.faults import FLIPS, Cluster, Faults, Scenario
from simulation.scenario import NAMED, draw_scenario


def test_a_failed_mover_leaves_nothing_in_quarantine() -> None:
    """A one-sided mover failed, nothing more was sent to that decode worker, and its leased blocks stayed in
    quarantine for ever: the prefill worker closed the channel on which it would have sent Release."""
    worlds = [
        simulate(seed, Scenario(Faults(mover_error=0.05), Cluster(one_sided=1.0)), requests=8)
        for seed in range(20)
    ]
    assert sum(world.counts["mover errors"] for world in worlds) >= 5
    assert not any(world.violations for world in worlds)


def test_a_lost_cache_report_is_made_good() -> None:
    """The coordinator missed a BlockEvents message, and believed ever after what that one would have
    changed."""
    worlds = [simulate(seed, Scenario(Faults(drop=0.05)), requests=30) for seed in range(8)]
    assert sum(world.counts["messages dropped"] for world in worlds) > 100
    assert not any(world.violations for world in worlds)


def test_echoes_of_old_messages_open_no_way_into_joined_blocks() -> None:
    """Prefill came twice, the second time after its handoff was over; the grant of the first time came twice
    too, and was taken for the second's: blocks that a sequence owned by then were written. And: a message
    that an older channel still brought made that channel the decode worker's way back to the sender, so that
    a quarantine was never lifted. And: a Meet that was sent to an earlier process, after a mover had failed
    there, made a decode worker take the one-sided mover in use for a two-sided one; and its answer was taken
    by the sender for that to its own Meet, so that the two went by different movers, and parcels came into
    blocks that had been verified."""
    scenario = Scenario(
        Faults(mover_error=0.03, double=0.2, late=0.1, kill_every=0.3), Cluster(one_sided=1.0)
    )
    assert not any(simulate(seed, scenario, requests=25).violations for seed in range(20))


def test_a_role_that_ended_cut_off_leaves_nothing_in_quarantine() -> None:
    """A flexible process wrote by shm, and its Release was lost in a partition, or the Grant that it would
    have answered. Its role ended, the process went on: the decode worker asked in vain for those blocks ever
    after."""
    scenario = Scenario(FLIPS, Cluster(num_prefill=1, num_decode=1, num_flexible=3, one_sided=1.0))
    worlds = [simulate(seed, scenario, requests=100) for seed in range(1, 3)]
    assert sum(world.network.sent["Retire"] for world in worlds) > 50
    assert not any(world.violations for world in worlds)


def test_a_writer_that_was_shut_out_and_granted_one_lease_more_does_not_keep_its_blocks() -> None:
    """A prefill worker was silent for long, and its way in, by a mover whose puts linger, was closed. It came
    back, was granted a lease, failed at its first put, and met the decode worker anew, by another mover; of
    that lease it reported nothing, and was asked for ever."""
    worlds = [simulate(seed, draw_scenario(seed), requests=150) for seed in (6081, 6094, 6096)]
    assert sum(world.counts["agents ended"] for world in worlds)
    assert sum(world.counts["leases left unsettled"] for world in worlds) >= 3
    assert not any(world.violations for world in worlds)


def test_a_decode_step_that_ran_out_of_memory_is_made_again_with_the_blocks_it_has() -> None:
    """The step made ahead of one that ran out of memory had been given its next block already; made again, it
    was given another one, and wrote there."""
    worlds = [simulate(seed, Scenario(Faults(step_no_memory=0.05)), requests=60) for seed in range(3)]
    assert sum(world.counts["steps out of memory"] for world in worlds) > 20
    assert not any(world.violations for world in worlds)


def test_an_echo_of_the_handoff_is_no_word_of_blocks_that_are_put_again() -> None:
    """Blocks that had come corrupt were asked for again; while their one-sided writer stood still in the
    middle of that put, an echo of the first Handoff came, the blocks were found right, and joined: they
    were then written once more, though others used them by then."""
    scenario = Scenario(
        Faults(corrupt_put=0.05, partial_put=0.05, double=0.5, freeze_in_put=0.05), Cluster(one_sided=1.0)
    )
    worlds = [simulate(seed, scenario, requests=100) for seed in range(5)]
    assert sum(world.counts["freezes in mid-put"] for world in worlds) > 20
    assert not any(world.violations for world in worlds)


def test_a_row_is_granted_once_where_several_coordinators_fill_a_worker() -> None:
    """A handoff was complete, its Join not yet taken by the decode worker's scheduler, and its row free in
    the books of both: it was granted once more, and the worker broke. One coordinator alone never sends a
    worker more than it has rows."""
    scenario = Scenario(Faults(coordinator_restart_every=1.0), Cluster(num_coordinators=3), rate=240.0)
    assert not any(simulate(seed, scenario, requests=150).violations for seed in range(2, 7))


def test_a_process_that_leaves_while_a_copy_hangs_is_ended() -> None:
    """A copy between devices could not be called back when its process left in good order: the process was
    killed at the end of its last turn, and the simulator with it."""
    world = simulate(3638969122, draw_scenario(3638969122), requests=100)
    assert world.counts["ended with a copy that hangs"]
    assert not world.violations


def test_a_process_may_be_killed_in_the_turn_in_which_a_role_begins() -> None:
    """The simulator asked the new role for its incarnation, which it did not know yet."""
    assert not simulate(2754393244, draw_scenario(2754393244), requests=250).violations


def test_a_handoff_that_is_held_back_has_the_checksums_of_the_blocks_that_were_put() -> None:
    """A copy hung, its prompt was dropped, and its block was computed anew for another one. The checksums
    were taken when the Handoff left, so that they fit the new content under the old hash."""
    assert not simulate(5160, draw_scenario(5160), requests=50).violations


def test_a_worker_that_only_waits_for_grammars_is_not_taken_for_dead() -> None:
    """The sequences of a decode worker all waited for their grammars, which were compiled one after the other
    for longer than a step may take: its coordinators took it for one whose step hangs, and fenced it."""
    assert not simulate(7000013, NAMED["odd"], requests=250).violations


def test_a_role_that_is_over_waits_for_no_process_whose_name_another_has_taken() -> None:
    """A prefill role had met two decode processes of one name, then both ended. It waited for ever until the
    first one confirmed that it holds no blocks."""
    assert not simulate(3304740551, NAMED["everything"]).violations


def test_a_prompts_last_chunk_that_is_computed_in_shorter_ones_hands_over_one_copy_of_its_state() -> None:
    """The first layers of a state had left with a step that then ran out of memory. Shorter chunks took its
    place, and the state came to lie in the other copy: the layers that left had no common checksum."""
    scenario = Scenario(Faults(step_no_memory=0.1), Cluster(num_prefill=1, num_decode=1, state_blocks=2))
    worlds = [simulate(seed, scenario, requests=100) for seed in range(35, 38)]
    assert sum(world.counts["layers put"] for world in worlds) > 50
    assert not any(world.violations for world in worlds)
