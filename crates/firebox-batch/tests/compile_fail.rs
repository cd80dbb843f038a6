//! What the compiler says to a user whose batch is wrong: every file of `ui` must fail with the text beside it.

#[test]
fn wrong_batches_get_helpful_messages() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
