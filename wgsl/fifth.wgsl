// Part of the weight formats with codes of 5 bits: the fifth of each code, 32 in a u32 from the lowest on.
@group(0) @binding(9) var<storage, read> fifth: array<u32>;

// Eight codes as bytes, those of elements 0, 2, 4, 6 and of 1, 3, 5, 7: from their nibbles, and their fifth bits in the lowest
// byte of `high`. Bits 2j (2j + 1) of it go to bits 8j + 4 by a product: bits 6j apart, what meets elsewhere carries into none
// of these.
fn even_codes(nibbles: Words, high: Words) -> Words {
  return (nibbles & Words(0x0f0f0f0fu)) | (((high & Words(0x55u)) * Words(0x410410u)) & Words(0x10101010u));
}
fn odd_codes(nibbles: Words, high: Words) -> Words {
  return ((nibbles >> Words(4u)) & Words(0x0f0f0f0fu)) | (((high & Words(0xaau)) * Words(0x208208u)) & Words(0x10101010u));
}
