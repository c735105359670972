"""What simulated clients are like: fast or slow, there or away, honest or not.

Their data may come and go.
"""
