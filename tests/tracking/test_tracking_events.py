from __future__ import annotations

import threading

from quadriga.tracking import EventLog


def test_a_reader_gets_every_event_once_and_in_order() -> None:
    log = EventLog()
    log.append("start", {"total_steps": 3})
    first, cursor = log.since()
    log.append("step", {"step": 1})
    log.append("step", {"step": 2})
    second, cursor = log.since(cursor)
    assert [event["kind"] for event in first] == ["start"]
    assert [event["step"] for event in second] == [1, 2]
    assert log.since(cursor) == ([], cursor)


def test_two_readers_do_not_disturb_each_other() -> None:
    log = EventLog()
    log.append("step", {"step": 1})
    one, _ = log.since(0)
    other, _ = log.since(0)
    assert one == other


def test_memory_is_bounded_and_a_slow_reader_is_told_what_it_missed() -> None:
    log = EventLog(capacity=10)
    for step in range(25):
        log.append("step", {"step": step})
    events, cursor = log.since(0)
    assert events[0]["kind"] == "lost"
    assert events[0]["count"] == 15
    assert [event["step"] for event in events[1:]] == list(range(15, 25))
    assert log.since(cursor)[0] == []
    log.append("step", {"step": 25})
    assert [event["step"] for event in log.since(cursor)[0]] == [25]


def test_many_threads_append_while_one_reads() -> None:
    log = EventLog(capacity=100_000)
    writers, each = 8, 2000

    def write(writer: int) -> None:
        for number in range(each):
            log.append("message", {"writer": writer, "number": number})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    read, cursor = [], 0
    while any(thread.is_alive() for thread in threads) or log.since(cursor)[0]:
        events, cursor = log.since(cursor)
        read += events
    assert len(read) == writers * each
    for writer in range(writers):
        assert [event["number"] for event in read if event["writer"] == writer] == list(range(each))


def test_a_listener_in_the_same_process_hears_events_at_once() -> None:
    heard: list[str] = []
    log = EventLog(listener=lambda event: heard.append(event["kind"]))
    log.append("start")
    log.append("end", {"status": "finished"})
    assert heard == ["start", "end"]
