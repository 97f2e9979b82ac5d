"""Everything that crosses a process or a machine."""
