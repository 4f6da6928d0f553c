// AVX2 with FMA and F16C.
#include "lanes_avx2.hpp"
#include "make_path.hpp"
#include "packed_avx2.hpp"

const kvine::Path kvine::avx2 = make_path<Avx2, PackedAvx2>("avx2");
