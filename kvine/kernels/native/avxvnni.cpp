// AVX2 with VNNI: laptops' CPUs that have no AVX-512.
#include "lanes_avx2.hpp"
#include "make_path.hpp"
#include "packed_vnni.hpp"

const kvine::Path kvine::avxvnni = make_path<Avx2, PackedVnni<PackedAvx2>>("avxvnni");
