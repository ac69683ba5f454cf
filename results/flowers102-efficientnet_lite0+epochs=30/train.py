import bisam, torch
base = torch.optim.AdamW(model.parameters(), lr=0.0001, weight_decay=0.01)
optimizer = bisam.SAM(base, model, rho=0.02, clip_norm=1, autocast=torch.bfloat16)
for x, y in loader:  # 30 epochs, lr up in 10% of the steps, then linearly down to 0
    optimizer.minimize(x, y)
