"""What simulated clients are like: fast or slow, there or away, honest or not, with data that come
and go."""
