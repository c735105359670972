"""Benchmarks of dure and its peers, in one run and on the same terms.

plan.py              what is measured: sizes, ranks, contenders
options.py           the plan, as the command line asks for it
contest.py           on the ranks: every contender checked, then timed, turn by turn
open_mpi.py          a job of Open MPI that sleeps between its turns
open_mpi_rank.py     what the ranks of that job run
result.py            the cells of a result: medians, bandwidths, the share of the memory's floor
run.py               the whole of `dure bench all-reduce`
progress.py          a bar or lines on the terminal while it runs
fit.py               a cost model from the measured cells, and how far its predictions are off
table.py, page.py    the result on a terminal and as a page
"""

from dure.worlds.processes.fork_server import server

server.keeps_here(__name__)
