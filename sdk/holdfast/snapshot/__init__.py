"""Copying the state into a segment without stopping the step: plan, buffer, engine, gate."""
