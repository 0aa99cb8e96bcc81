import os

# Before torch is imported, for every process that tests start: they share few cores, and threads that wait by spinning take
# them from each other. (torch.set_num_threads does not bind the threads that other threads start.)
os.environ.setdefault("OMP_NUM_THREADS", "1")
