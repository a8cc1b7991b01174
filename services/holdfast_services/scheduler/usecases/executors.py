"""What executors say is written down, and answered with orders."""

from __future__ import annotations

from holdfast.core.executions import LEASE_S, ExecutorReport, Orders, check
from holdfast.core.ids import node_name
from holdfast.errors import AlreadyExistsError
from holdfast_services.scheduler.domain.orders import orders_by_node
from holdfast_services.scheduler.storage import ExecutorRow, Statements

POLLS_PER_LEASE = 4
FORGET_S = 7 * 86_400.0


def hear(statements: Statements, node: str, report: ExecutorReport) -> bool:
    """Write a report down, unless a newer one is there; return whether it says anything new.

    Raises:
        InvalidRequestError: names or numbers that make no sense.
        AlreadyExistsError: another executor of this node lives.
    """
    node_name(node)
    check(report)
    now_s = statements.now_s()
    known = statements.executor(node)
    if known is not None and known.report.executor != report.executor:
        if known.lease_until_s > now_s:
            left_s = known.lease_until_s - now_s
            raise AlreadyExistsError(
                f"node {node} has another executor, which reported {LEASE_S - left_s:.0f} s ago: "
                f"end it, or wait {left_s:.0f} s",
                node=node,
            )
        known = None
    until_s = now_s + LEASE_S
    if known is not None and report.sequence <= known.report.sequence:
        statements.renew_executor(node, until_s)
        return False
    statements.save_executor(ExecutorRow(node=node, report=report, lease_until_s=until_s))
    return True


def leave(statements: Statements, node: str, executor: str) -> None:
    """Have an executor that ends count as gone from now on."""
    known = statements.executor(node)
    if known is not None and known.report.executor == executor:
        statements.renew_executor(node, statements.now_s())


def all_orders(statements: Statements) -> dict[str, Orders]:
    """Return what each node is to have now; of others, nothing."""
    jobs = (kept.job for kept in statements.open_jobs())
    return orders_by_node(jobs, statements.now_s())
