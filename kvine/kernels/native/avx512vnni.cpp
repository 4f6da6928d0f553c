// AVX-512 with VNNI.
#include "lanes_avx512.hpp"
#include "make_path.hpp"
#include "packed_vnni.hpp"

const kvine::Path kvine::avx512vnni = make_path<Avx512, PackedVnni<PackedAvx512>>("avx512vnni");
