"""What measures and proves: verification, fault injection, plans, experiments. Knows no terminal."""
