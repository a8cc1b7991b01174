"""Several that open a new catalogue at once all get it."""

from __future__ import annotations

import threading

from holdfast_services.kit.db import make_engine, write_transaction

FILES = 40
AT_ONCE = 8


def test_none_of_several_that_open_a_new_file_at_once_is_refused(tmp_path):
    """Turning on the write-ahead log waits for nobody: one in ten files refused somebody."""
    failures = []

    def write(path, together):
        engine = make_engine(f"sqlite:///{path}", connections_max=1)
        together.wait()
        try:
            with write_transaction(engine):
                pass
        except Exception as error:
            failures.append(error)
        engine.dispose()

    for number in range(FILES):
        together = threading.Barrier(AT_ONCE)
        threads = [
            threading.Thread(target=write, args=(tmp_path / f"{number}.db", together))
            for _ in range(AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
