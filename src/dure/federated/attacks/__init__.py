"""Attacks on recorded updates, by an attacker that reads the server of a simulation.

recording    updates written to disk, and the true examples in separate files
observation  an update, or a sum of updates, as the attacker observes it
changes      noise and compression that are applied to the updates before an attack
labels       number of examples of each class, from the last layer
linear       inputs from a first linear layer, in closed form
inversion    inputs by gradient inversion: the code that `dlg` and `geiping` share
likeness     assignment of rebuilt examples to originals, and their distance
membership   membership inference by the loss of an example
canaries     clients with a distinct update; `epsilon` turns the guesses into a bound
examine      all attacks, as rows of a table
"""
