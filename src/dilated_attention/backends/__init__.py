"""How a plan is computed: `table` chooses; every other module is one way of computing."""
