#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::fuzz::read_write_histories(data));
