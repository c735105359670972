"""Random numbers as a function of the seed and their purpose."""
