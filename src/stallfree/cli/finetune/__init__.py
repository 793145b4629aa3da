"""`stallfree finetune`: data file in, fine-tuned model out."""
