"""For learners: transitions, unrolls, rollouts, returns, evaluation."""
