"""What updates give away: attacks by whoever reads the server, on what a simulation has kept.

recording     updates that are kept, and apart from them the truth
seen          what the attacker has of one of them, or of a sum of several
changes       what noise or compression leave of it
labels        how many examples of each class, from the last layer
linear        inputs from a first linear layer, in closed form
inversion     inputs by gradient inversion: what `dlg` and `geiping` have in common
likeness      which original each is, and how near
membership    was this example in it? by its loss
canaries      clients that leave a clear trace; `epsilon` makes a bound of what is guessed
examine       all of them, as rows of a table
"""
