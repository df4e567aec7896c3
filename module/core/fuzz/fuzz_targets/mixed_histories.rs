#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::fuzz::mixed_histories(data));
