"""Benchmarks of dure and its peers, in a single run and under the same conditions.

plan.py              the plan: sizes, ranks, contenders
options.py           the plan from options of the command line
contest.py           on the ranks: every contender checked, then timed, in turn
open_mpi.py          a job of Open MPI that sleeps between its turns
open_mpi_rank.py     program of the ranks of that job
result.py            the cells of a result: medians, bandwidths, the share of the memory's floor
run.py               the whole of `dure bench all-reduce`
progress.py          a bar or lines on the terminal during the run
fit.py               a cost model from the measured cells, and the error of its predictions
table.py, page.py    the result on a terminal and as a page
"""

from dure.worlds.processes.fork_server import server

server.keeps_here(__name__)
