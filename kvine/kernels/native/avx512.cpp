// AVX-512F.
#include "lanes_avx512.hpp"
#include "make_path.hpp"
#include "packed_avx2.hpp"

const kvine::Path kvine::avx512 = make_path<Avx512, PackedAvx2>("avx512");
