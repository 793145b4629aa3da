// The AVX-512 path: F, BW, DQ and VL.
#include <immintrin.h>

#include "update.h"

namespace {

struct AVX512 {
  using Float = __m512;
  using Int = __m512i;
  static constexpr int width = 16;
  static constexpr int unroll = 4;

  struct All {};
  static All all_lanes() { return {}; }
  static __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }

  static Float zero() { return _mm512_setzero_ps(); }
  static Float set1(float x) { return _mm512_set1_ps(x); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float fnma(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }

  static Int set1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int mul(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static Int bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int bit_xor(Int a, Int b) { return _mm512_xor_si512(a, b); }
  template <int n> static Int shift_right(Int a) { return _mm512_srli_epi32(a, n); }
  static Int counting_from(uint32_t first) {
    return add(set1(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }

  // m / (sqrt(v) root_scale + eps). A 14-bit estimate y of 1 / sqrt(v) and one Newton step cost fewer cycles than vsqrtps
  // and leave the divider to vdivps: with s = v y and e = 1 - s y, sqrt(v) = s (1 + e / 2) up to 1.5 * 2^-28, relatively.
  // The fix-up gives y a finite value at v = 0 (so that s = 0) and 1 at infinity (so that the quotient is 0 there, as
  // in torch); NaN goes through.
  static Float quotient(Float m, Float v, float root_scale, float eps) {
    const Int classes = _mm512_set1_epi32(0x00A00E00);  // zero -> the largest float, +infinity -> 1, others -> unchanged
    const Float y = _mm512_fixupimm_ps(_mm512_rsqrt14_ps(v), v, classes, 0);
    const Float s = mul(v, y);
    const Float e = fnma(s, y, set1(1.0f));
    const Float scale = fma(e, set1(0.5f * root_scale), set1(root_scale));
    return _mm512_div_ps(m, fma(s, scale, set1(eps)));
  }

  static Float load(const float* p, All) { return _mm512_loadu_ps(p); }
  static Float load(const float* p, __mmask16 k) { return _mm512_maskz_loadu_ps(k, p); }
  static Float load(const BF16* p, All) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Float load(const BF16* p, __mmask16 k) { return widen_bf16(_mm256_maskz_loadu_epi16(k, p)); }
  static Float load(const F16* p, All) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Float load(const F16* p, __mmask16 k) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(k, p)); }

  static void store(float* p, Float x, All) { _mm512_storeu_ps(p, x); }
  static void store(float* p, Float x, __mmask16 k) { _mm512_mask_storeu_ps(p, k, x); }
  template <class Lanes> static void store(BF16* p, Float x, Lanes lanes) {
    const Int odd = bit_and(shift_right<16>(_mm512_castps_si512(x)), set1(1u));
    store_stochastic(p, x, add(odd, set1(0x7fffu)), lanes);  // half an ulp, less one unless the result would be odd: ties go to even
  }
  template <class Lanes> static void store(F16* p, Float x, Lanes lanes) {
    store_half_words(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), lanes);
  }

  // Adds `low` (below 2^16) to the bits of x and drops the low 16: rounds up with probability low16(x) / 2^16. Every NaN becomes 0x7fc0.
  template <class Lanes> static void store_stochastic(BF16* p, Float x, Int low, Lanes lanes) {
    const Int rounded = shift_right<16>(add(_mm512_castps_si512(x), low));
    const Int bits = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), set1(0x7fc0u));
    store_half_words(p, _mm512_cvtepi32_epi16(bits), lanes);
  }

 private:
  static Float widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static void store_half_words(void* p, __m256i x, All) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static void store_half_words(void* p, __m256i x, __mmask16 k) { _mm256_mask_storeu_epi16(p, k, x); }
};

}  // namespace

namespace stallfree {
const Table avx512_table = STALLFREE_TABLE(AVX512);
}
