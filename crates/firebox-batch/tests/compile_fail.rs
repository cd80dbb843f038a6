//! Compiler messages for wrong batches: every file in `ui` must fail with the text of its
//! `.stderr`.

#[test]
fn wrong_batches_get_helpful_messages() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
