"""C++ kernels for the CPU: their sources, how they are compiled (:mod:`kernels.cpu.build`) and how the library is found
and called (:mod:`kernels.cpu.library`). Kept free of imports, as :mod:`kernels` is."""
